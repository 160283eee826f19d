"""What a guarded EC connector lets the proxy see: whether an item arrived, and that one was lost.

A guarded encoder says in its 200 what became of each push. A guarded PD lives on when an item is missing and
ends that request alone: with a 500 that looks like any, or with a stream of a role and nothing else. Signs
as seen with vLLM 0.30.
"""

from typing import Literal

import msgspec

__all__ = ["DELIVERED", "Head", "LostError", "is_lost_answer", "outcome", "placeholder"]

DELIVERED = "delivered"
HEAD_LIMIT = 64 * 1024
DONE = b"[DONE]"


class LostError(Exception):
    """The PD could not get an item of this request. Nothing has been sent to the client."""


class _Params(msgspec.Struct):
    ec_guard: dict[str, str] | None = None


class _Answer(msgspec.Struct):
    ec_transfer_params: _Params | None = None


class _Error(msgspec.Struct):
    message: str = ""
    type: str = ""
    code: int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


_answer = msgspec.json.Decoder(_Answer)
_error = msgspec.json.Decoder(_ErrorBody)


def outcome(body: bytes) -> str | None:
    """What an encoder's 200 says of its pushes: "delivered" for all, else what became of another.

    None when it says nothing: it is not guarded.
    """
    if b'"ec_guard"' not in body:
        return None
    try:
        params = _answer.decode(body).ec_transfer_params
    except msgspec.DecodeError:
        return None
    if params is None or params.ec_guard is None:
        return None
    others = [word for word in params.ec_guard.values() if word != DELIVERED]
    return others[0][:40] if others else DELIVERED if params.ec_guard else "unknown"


def placeholder(data: bytes | bytearray) -> bool:
    """Whether an answer, or a piece of a stream, says that zeros stood in for an item."""
    return b'"ec_guard"' in data and b'"placeholder"' in data


def is_lost_answer(status: int, body: bytes) -> bool:
    """Whether a PD's answer may be that of a request that it ended for a lost item.

    vLLM says the same of other errors inside, but not when its engine has died.
    """
    if status != 500:
        return False
    try:
        error = _error.decode(body).error
    except msgspec.DecodeError:
        return False
    return (error.message, error.type) == ("Internal server error", "InternalServerError")


class _Choice(msgspec.Struct):
    delta: dict[str, msgspec.Raw] = {}
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]
    error: msgspec.Raw | None = None


_chunk = msgspec.json.Decoder(_Chunk)
_EMPTY = frozenset({b"null", b'""', b"[]", b"{}"})


class Head:
    """The beginning of a stream, held back until it says something.

    A role alone is nothing; content, a reason, an error, or what is not understood is something.
    """

    __slots__ = ("_looked", "held")

    def __init__(self) -> None:
        self.held = bytearray()
        self._looked = 0

    def feed(self, data: bytes) -> Literal["hold", "release", "lost"]:
        """Take the next bytes; `held` is all of them."""
        self.held += data
        while True:
            end, step = self._event_end()
            if end < 0:
                return "release" if len(self.held) > HEAD_LIMIT else "hold"
            event = bytes(self.held[self._looked : end])
            self._looked = end + step
            verdict = self._of(event)
            if verdict != "hold":
                return verdict

    def _event_end(self) -> tuple[int, int]:
        plain, crlf = self.held.find(b"\n\n", self._looked), self.held.find(b"\r\n\r\n", self._looked)
        if crlf >= 0 and (plain < 0 or crlf < plain):
            return crlf, 4
        return plain, 2

    @staticmethod
    def _of(event: bytes) -> Literal["hold", "release", "lost"]:
        lines = [line for line in event.splitlines() if line and not line.startswith(b":")]
        if not lines:
            return "hold"  # a comment keeps the connection alive
        if len(lines) != 1 or not lines[0].startswith(b"data:"):
            return "release"
        data = lines[0][5:].strip()
        if data == DONE:
            return "lost"
        try:
            chunk = _chunk.decode(data)
        except msgspec.DecodeError:
            return "release"
        if chunk.error is not None or not chunk.choices:
            return "release"
        return "hold" if all(_silent(choice) for choice in chunk.choices) else "release"


def _silent(choice: _Choice) -> bool:
    if choice.finish_reason is not None:
        return False
    return all(name == "role" or bytes(value).strip() in _EMPTY for name, value in choice.delta.items())

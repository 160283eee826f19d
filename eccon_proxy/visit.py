"""One visit of an item to an encoder: the request, what its answer means, and how it is taken back."""

import asyncio
from collections.abc import Sequence

import msgspec

from eccon_proxy import guard
from eccon_proxy.encoders import Encoder
from eccon_proxy.errors import Failure
from eccon_proxy.plan import Buffer, Item
from eccon_proxy.upstream import UpstreamError
from eccon_proxy.vitals import encoded

__all__ = ["Attempt", "EncodeError", "ask"]

CHAT = b"/v1/chat/completions"
ANSWER_LIMIT = 1024 * 1024
"""An encoder's answer is a few hundred bytes; more than this is not one."""


class _Error(msgspec.Struct):
    error: dict[str, object] | str


_error = msgspec.json.Decoder(_Error)


class EncodeError(Exception):
    """One attempt failed; `cause` is the reason as metrics name it, `blame` tells whose fault it is."""

    def __init__(self, cause: str, message: str, *, blame: bool, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.blame = blame
        self.retry_after = retry_after


class Attempt:
    """A visit under way, of the task that makes it; may be taken back, so that its item goes elsewhere."""

    __slots__ = ("evicted", "fetched", "started", "task")

    def __init__(self, started: float, *, fetched: bool) -> None:
        self.started = started
        self.fetched = fetched
        self.evicted = ""
        self.task: asyncio.Task[object] | None = asyncio.current_task()

    def over(self) -> None:
        """It has ended. A task that ended with an error holds the frames that hold this, and the body."""
        self.task = None

    def evict(self, reason: str) -> None:
        """Give up this visit and try another encoder."""
        if not self.evicted and self.task is not None:
            self.evicted = reason
            self.task.cancel()


async def ask(
    encoder: Encoder, headers: bytes, body: Sequence[Buffer], item: Item, *, limit: float, fresh: bool
) -> str | None:
    """Have one item encoded: returns when the encoder has answered that it did.

    What is returned is a guarded encoder's word on its push (see `eccon_proxy.guard`), None of any other.

    Raises `EncodeError` when another encoder may do better, and the client's own `Failure` when the
    encoder refuses the item. `limit` is the longest whole visit, in seconds.
    """
    try:
        response = await encoder.upstream.request(
            b"POST", CHAT, headers, body, timeout=limit, total=limit, fresh=fresh
        )
        try:
            answer = await response.read_all(ANSWER_LIMIT)
        finally:
            response.close()
    except UpstreamError as error:
        cause = "stale" if error.stale and not fresh else error.cause
        raise EncodeError(cause, str(error), blame=cause not in {"stale", "exhausted"}) from None
    status = response.status
    if status == 200:
        if not encoded(answer):
            raise EncodeError("protocol", f"{encoder.id} answers 200 without choices", blame=True)
        return guard.outcome(answer or b"")
    if status in {429, 503}:
        wait = response.header(b"retry-after") or b""
        seconds = float(wait) if wait.isdigit() and len(wait) < 6 else None
        raise EncodeError("busy", f"{encoder.id} is busy ({status})", blame=False, retry_after=seconds)
    if 400 <= status < 500 and status != 408:
        raise _refused(status, answer or b"", response.header(b"content-type"), item)
    raise EncodeError("status", f"{encoder.id} answers {status}: {_message(answer or b'')}", blame=True)


def _message(body: bytes) -> str:
    try:
        error = _error.decode(body).error
    except msgspec.DecodeError:
        return body[:200].decode("utf-8", "replace")
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def _refused(status: int, body: bytes, content_type: bytes | None, item: Item) -> Failure:
    """The encoder's refusal of a part, with its own error object."""
    message = f"{item.where}: {_message(body)}"
    try:
        error = _error.decode(body).error
        ours = not isinstance(error, dict) or not isinstance(error.get("message"), str)
    except msgspec.DecodeError:
        ours = True
    if ours:  # no error object: vLLM's own 401 has a string, a stray web server a page
        return Failure(status, message, kind="invalid_request_error", param=item.where)
    is_json = content_type is not None and content_type.lower().startswith(b"application/json")
    headers = ((b"content-type", content_type if is_json and content_type else b"application/json"),)
    return Failure(status, message, kind="invalid_request_error", headers=headers, body=body)

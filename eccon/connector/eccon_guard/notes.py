"""What the worker lets the scheduler know, and the scheduler's picture of it."""

import time
from collections import OrderedDict
from typing import Any, Literal

import msgspec

__all__ = ["Board", "Note", "decode", "encode"]

Kind = Literal["staged", "pending", "bad", "gone", "placeholder", "outcome", "link", "restart"]
REMEMBERED = 8192
BAD_S = 60.0
"""How long a failure counts against a request that comes later."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """One line of the channel.

    PD: an item is `staged`, `pending` (announced anew after a failure), `bad`, `gone` (let go), or a
    `placeholder` took its place in a step. Encoder: `outcome` of a push, and whether the `link` is open.
    Both: `restart`, what holds now is said anew.
    """

    kind: Kind
    mm_hash: str = ""
    text: str = ""
    """Reason, outcome, or "up" and "down"."""
    at: float = 0.0
    """Unix time."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Note)


def encode(note: Note) -> bytes:
    """As one packet."""
    return _encoder.encode(note)


def decode(raw: bytes) -> Note:
    """Raises msgspec.DecodeError for what is none."""
    return _decoder.decode(raw)


class Board:
    """The scheduler's picture. Everything in it is bounded."""

    def __init__(self) -> None:
        self.link_up = False
        self.placeholders: OrderedDict[str, None] = OrderedDict()
        """Hashes of which the prefix cache may hold zeros: never to be used again in this life."""
        self._staged: set[str] = set()
        self._bad: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._outcomes: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def take(self, note: Note) -> None:
        """One note."""
        mm_hash = note.mm_hash
        if note.kind == "staged":
            self._staged.add(mm_hash)
            self._bad.pop(mm_hash, None)
        elif note.kind == "pending":
            self._bad.pop(mm_hash, None)
        elif note.kind == "bad":
            self._bad[mm_hash] = (note.text, note.at)
            self._bound(self._bad)
        elif note.kind == "gone":
            self._staged.discard(mm_hash)
        elif note.kind == "placeholder":
            self.placeholders[mm_hash] = None
            self._bound(self.placeholders)
        elif note.kind == "outcome":
            self._outcomes[mm_hash] = (note.text, note.at)
            self._outcomes.move_to_end(mm_hash)
            self._bound(self._outcomes)
        elif note.kind == "link":
            self.link_up = note.text == "up"
        else:
            self._staged.clear()
            self.link_up = False

    def staged(self, mm_hash: str) -> bool:
        """Whether an item's tensor is at hand."""
        return mm_hash in self._staged

    def bad(self, mm_hash: str) -> str:
        """Why an item will not come; empty when it may."""
        if mm_hash in self.placeholders:
            return "the prefix cache holds zeros in its place"
        reason, at = self._bad.get(mm_hash, ("", 0.0))
        if reason and time.time() - at > BAD_S:
            del self._bad[mm_hash]
            return ""
        return reason

    def outcome(self, mm_hash: str, since: float) -> str:
        """What became of the push of a hash at or after a Unix time; "unknown" when nothing is known."""
        text, at = self._outcomes.get(mm_hash, ("unknown", 0.0))
        return text if at >= since else "unknown"

    @staticmethod
    def _bound(table: "OrderedDict[str, Any]") -> None:
        while len(table) > REMEMBERED:
            table.popitem(last=False)

"""Events of guarded connectors, one JSON datagram each: the steps of their logs, and how many went missing.

Every sender (a process has two: scheduler and worker) numbers its events from 1, so what found no room in the
socket shows as a gap.
"""

import re
from collections import OrderedDict

import msgspec

from eccon.signals.connector import ItemEvent, Step

__all__ = ["Event", "Gaps", "item", "level", "parse"]

STEPS: dict[str, Step] = {
    "push": "pushed",
    "meta": "received",
    "pull_start": "initiated",
    "pull_done": "complete",
}
SENDERS = 1024
LEVEL = re.compile(rb"EC guard: level=(gate|wrap|hooks|vendor)\b")
UNGUARDED = b"RblnECNixlConnector created (role="
"""Of the vendor's own; below the guard too when that has stepped down to it, and says so right after."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One datagram. Unknown keys are passed over."""

    who: str
    """The process, as the launcher named it."""
    level: str = msgspec.field(default="", name="l")
    sender: str = msgspec.field(name="s")
    number: int = msgspec.field(name="n")
    at_us: int = msgspec.field(name="t")
    """Unix time."""
    kind: str = msgspec.field(name="k")
    mm_hash: str = msgspec.field(default="", name="h")
    peer: str = msgspec.field(default="", name="p")
    nbytes: int = msgspec.field(default=0, name="b")
    text: str = msgspec.field(default="", name="x")


_decoder = msgspec.json.Decoder(Event)


def parse(datagram: bytes) -> Event | None:
    """None for what is no event."""
    try:
        return _decoder.decode(datagram)
    except (msgspec.DecodeError, RecursionError):
        return None


def item(event: Event) -> ItemEvent | None:
    """The step of an item that an event tells of, if it does."""
    step = STEPS.get(event.kind)
    if event.kind == "ack" and event.text == "delivered":
        step = "acked"  # the encoder has it; the PD's own event says that it was sent
    return None if step is None else ItemEvent(step, event.at_us / 1e6, event.mm_hash)


def level(lines: bytes) -> str | None:
    """The level that a log tells last, "off" when the vendor's connector runs by itself; None: not told."""
    if b"EC guard: level=" in lines and (found := LEVEL.findall(lines)):
        told: bytes = found[-1]
        return told.decode()
    return "off" if UNGUARDED in lines else None


class Gaps:
    """Counts the events that did not arrive, by the numbers of those that did."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()
        self.lost = 0

    def take(self, event: Event) -> int:
        """How many went missing before this one. Of a sender heard for the first time nothing is missed."""
        last = self._last.get(event.sender)
        self._last[event.sender] = max(event.number, last or 0)
        self._last.move_to_end(event.sender)
        while len(self._last) > SENDERS:
            self._last.popitem(last=False)
        missing = 0 if last is None else max(0, event.number - last - 1)
        self.lost += missing
        return missing

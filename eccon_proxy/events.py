"""What changes, as numbered events that a client of the admin API can resume."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from eccon_proxy.schema import EncoderInfo, PDInfo, ProxyState, Trace
from eccon_proxy.trace import Recorder

__all__ = ["Event", "Feed"]

Kind = Literal["trace", "encoder", "pd", "state", "shutdown"]
Payload = Recorder | Trace | EncoderInfo | PDInfo | ProxyState | dict[str, str]
PING_SECONDS = 15.0


class Event:
    """One event. A trace that nobody watched is rendered when it is sent, and shows what it is then."""

    __slots__ = ("kind", "payload", "seq")

    def __init__(self, seq: int, kind: Kind, payload: Payload) -> None:
        self.seq = seq
        self.kind = kind
        self.payload = payload

    def render(self) -> bytes:
        """The event as SSE."""
        payload = self.payload.snapshot() if isinstance(self.payload, Recorder) else self.payload
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (
            self.seq, self.kind.encode(), msgspec.json.encode(payload),
        )  # fmt: skip


class Feed:
    """A ring of the last events and those who read it."""

    def __init__(self, size: int = 4096) -> None:
        self.seq = 0
        self.ended = False
        self._ring: deque[Event] = deque(maxlen=size)
        self._readers: set[asyncio.Event] = set()

    @property
    def watched(self) -> bool:
        """Whether anybody reads now."""
        return bool(self._readers)

    def publish(self, kind: Kind, payload: Payload) -> None:
        """Add an event."""
        self.seq += 1
        if self._readers and isinstance(payload, Recorder):
            payload = payload.snapshot()
        self._ring.append(Event(self.seq, kind, payload))
        for reader in self._readers:
            reader.set()

    def end(self) -> None:
        """Say `shutdown` and let the readers go."""
        self.publish("shutdown", {})
        self.ended = True

    def can_resume(self, after: int) -> bool:
        """Whether everything after event `after` is still held."""
        return after <= self.seq and (
            after == self.seq or (bool(self._ring) and self._ring[0].seq <= after + 1)
        )

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Every event after `after`, then what comes, with a comment when nothing does.

        A reader that falls behind the ring gets a gap: it sees that in the ids.
        """
        wake = asyncio.Event()
        self._readers.add(wake)
        try:
            while True:
                wake.clear()
                fresh = [e for e in self._ring if e.seq > after] if after < self.seq else []
                if fresh:
                    after = fresh[-1].seq
                    yield b"".join(e.render() for e in fresh)
                    continue
                if self.ended:
                    return
                try:
                    await asyncio.wait_for(wake.wait(), PING_SECONDS)
                except asyncio.TimeoutError:
                    yield b": ping\n\n"
        finally:
            self._readers.discard(wake)

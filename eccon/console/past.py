"""Requests that the daemon does not keep any more: the console holds on to them, packed small."""

import zlib
from itertools import takewhile

import msgspec

from eccon.console.draw.traces import Words, words_of
from eccon.model import TRACES_KEPT, ClusterState, Trace

__all__ = ["ALL_KEPT", "Kept", "Past"]

ALL_KEPT = 10_000
"""Requests of a console in all, those of the daemon's state included."""
PACKED_AT_ONCE = 100
"""Packing one takes about 50 µs: so many are done in a frame without a key's answer being late."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Trace).decode


class Kept:
    """One request; 9 KiB as it is with eight images, 1 KiB packed."""

    __slots__ = ("_packed", "_trace", "words")

    def __init__(self, trace: Trace) -> None:
        self.words: Words = words_of(trace)
        self._trace: Trace | None = trace
        self._packed = b""

    def pack(self) -> None:
        """Makes it small."""
        if self._trace is not None:
            self._packed, self._trace = zlib.compress(_encode(self._trace), 1), None

    def trace(self) -> Trace:
        """The request as it was last known."""
        return self._trace if self._trace is not None else _decode(zlib.decompress(self._packed))


class Past:
    """The requests that fell out of the state, up to a bound, the oldest first."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}
        self._loose: list[Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def note(self, before: ClusterState, after: ClusterState) -> None:
        """Takes what is in one state and not in the next. Those of another cluster are forgotten."""
        if before.cluster.name != after.cluster.name:
            self._kept.clear()
            self._loose.clear()
            return
        old, new = before.traces, after.traces
        if not old or old is new:
            return
        if new and new[-1].id in self._kept:
            del self._kept[new[-1].id]  # heard of again, so it is in the state again
        if new and old[0].id == new[0].id:
            return
        still = {t.id for t in new}
        for trace in takewhile(lambda t: t.id not in still, old):
            self._kept[trace.id] = kept = Kept(trace)
            self._loose.append(kept)
        while len(self._kept) > ALL_KEPT - TRACES_KEPT:
            del self._kept[next(iter(self._kept))]

    def pack(self) -> None:
        """Packs some of what is not yet; called with each frame."""
        some, self._loose = self._loose[:PACKED_AT_ONCE], self._loose[PACKED_AT_ONCE:]
        for kept in some:
            kept.pack()

    def find(self, trace_id: str) -> Trace | None:
        """The request of that id."""
        kept = self._kept.get(trace_id)
        return None if kept is None else kept.trace()

    def newest_first(self, without: frozenset[str] = frozenset()) -> list[tuple[str, Kept]]:
        """(id, request) of all but those `without`."""
        return [(i, kept) for i, kept in reversed(self._kept.items()) if i not in without]

"""Which requests were at the PD when it died: one that took part in several deaths is not sent again.

A death says nothing about a request when somebody announced that the PD would be restarted. Nor is an old
one held against anybody: a monitor's "hi" is in flight at every death of a year.
"""

from collections import deque
from collections.abc import Iterable

__all__ = ["Suspects"]

BREAK_SECONDS = 15.0
"""A connection that broke this long before the PD was seen down belongs to that death."""
SIZE = 1024
"""Fingerprints remembered; the one whose last death is the oldest goes first."""


class Suspects:
    """Fingerprints of requests and the deaths that each took part in. Times are the loop's."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._broken: deque[tuple[float, int]] = deque(maxlen=SIZE)
        self._deaths: dict[int, list[float]] = {}
        self._charged: frozenset[int] = frozenset()
        """Who was there when it fell silent: a death only if another process comes back."""
        self._excused_until = 0.0

    def __len__(self) -> int:
        return len(self._deaths)

    def broke(self, fingerprint: int, now: float) -> None:
        """A connection to the PD broke under this request."""
        self._broken.append((now, fingerprint))

    def excuse(self, until: float) -> None:
        """The PD will go away on purpose: an end before that time counts against nobody."""
        self._excused_until = until

    def died(self, inflight: Iterable[int], now: float, *, sure: bool) -> None:
        """The PD ended with these requests at it; not `sure` when it only fell silent."""
        involved = frozenset((*inflight, *(mark for at, mark in self._broken if now - at < BREAK_SECONDS)))
        self._broken.clear()
        if now < self._excused_until:
            return
        if sure:
            self._count(involved, now)
        else:
            self._charged = involved

    def returned(self, now: float, *, another: bool) -> None:
        """The PD is there again, as `another` process or the same. An announced restart is over."""
        if another:
            self._count(self._charged, now)
        self._charged = frozenset()
        if now < self._excused_until:
            self._broken.clear()
        self._excused_until = 0.0

    def deaths(self, fingerprint: int, now: float) -> int:
        """Deaths that this request took part in, those long ago left out."""
        return len(self._recent(fingerprint, now)) if self._deaths else 0

    def _recent(self, mark: int, now: float) -> list[float]:
        return [at for at in self._deaths.get(mark, ()) if now - at < self._seconds]

    def _count(self, marks: Iterable[int], now: float) -> None:
        for mark in marks:
            times = [*self._recent(mark, now), now]
            self._deaths.pop(mark, None)
            self._deaths[mark] = times
        # In order of their last death: what is old goes, and the oldest of the rest when it is too much.
        for mark, times in tuple(self._deaths.items()):
            if now - times[-1] < self._seconds and len(self._deaths) <= SIZE:
                return
            del self._deaths[mark]

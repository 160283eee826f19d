"""Distributions of milliseconds that can be merged: over time slices, over encoders, over daemons.

Buckets grow by a sixteenth of an octave, so a quantile is right to about 2 %, whatever its size.
"""

import math
from collections.abc import Iterable

import msgspec

from eccon.model import Quantiles

__all__ = ["Recent", "quantiles"]

PER_OCTAVE = 16
LEAST_MS = 0.001
SLICE_S = 600.0
SLICES = 6
"""What is older than an hour does not count any more."""


class Recent(msgspec.Struct):
    """Samples of the last hour. `slices` maps a slice's number to counts by bucket."""

    slices: dict[int, dict[int, int]] = {}

    def add(self, ms: float, at: float) -> None:
        """One sample, taken at the Unix time `at`."""
        number = int(at // SLICE_S)
        here = self.slices.setdefault(number, {})
        bucket = _bucket(ms)
        here[bucket] = here.get(bucket, 0) + 1
        self._expire(number)

    def absorb(self, other: "Recent") -> None:
        """All samples of another one, too."""
        for number, counts in other.slices.items():
            here = self.slices.setdefault(number, {})
            for bucket, count in counts.items():
                here[bucket] = here.get(bucket, 0) + count

    def _expire(self, newest: int) -> None:
        for number in [n for n in self.slices if n <= newest - SLICES]:
            del self.slices[number]


def quantiles(parts: Iterable[Recent], now: float) -> Quantiles | None:
    """Of several together, to 0.1 ms; None when there are no samples in the hour before `now`."""
    oldest = int(now // SLICE_S) - SLICES
    merged: dict[int, int] = {}
    for part in parts:
        for number, counts in part.slices.items():
            if number > oldest:
                for bucket, count in counts.items():
                    merged[bucket] = merged.get(bucket, 0) + count
    total = sum(merged.values())
    if not total:
        return None
    ordered = sorted(merged.items())
    return Quantiles(total, _quantile(ordered, total, 0.5), _quantile(ordered, total, 0.99))


def _bucket(ms: float) -> int:
    return round(math.log2(max(ms, LEAST_MS)) * PER_OCTAVE)


def _quantile(ordered: list[tuple[int, int]], total: int, share: float) -> float:
    """By nearest rank, the middle of its bucket."""
    rank = round((total - 1) * share)
    for bucket, count in ordered:
        rank -= count
        if rank < 0:
            return round(math.pow(2, bucket / PER_OCTAVE), 1)
    return round(math.pow(2, ordered[-1][0] / PER_OCTAVE), 1)

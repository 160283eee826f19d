"""Finds encoders that are of no use though their health says 200: stuck, or put out by the proxy."""

import time

import msgspec

from eccon_proxy.schema import ON_TRIAL, EncoderInfo

__all__ = ["OutWatch", "StallWatch"]

FACTOR = 8.0
"""Times the recent 99th percentile of an encode."""
FLOOR_S = 5.0
UNKNOWN_S = 90.0
"""Before anything was measured: one image may take 14 s on an NPU, and a queue of them longer."""


class _Progress(msgspec.Struct):
    finished: int = -1
    since: float = 0.0


class StallWatch:
    """Fed with what the proxy says of each encoder, says how long one has been stuck."""

    def __init__(self) -> None:
        self._progress: dict[str, _Progress] = {}

    def stuck_s(self, info: EncoderInfo) -> float | None:
        """Seconds without an item finished, when that is too long; None when all is well."""
        now = time.monotonic()
        p = self._progress.setdefault(info.id, _Progress())
        finished = info.items + info.errors
        if finished != p.finished or info.inflight == 0:
            p.finished, p.since = finished, now
            return None
        p99 = info.encode_ms_p99
        limit = UNKNOWN_S if p99 is None else max(FLOOR_S, FACTOR * p99 / 1000)
        waited = now - p.since
        return waited if waited > limit else None

    def forget(self, name: str) -> None:
        """A new life begins afresh."""
        self._progress.pop(name, None)


class OutWatch:
    """Fed as `StallWatch`, says how long the proxy has sent an encoder nothing but trials.

    The proxy counts anew from each trial that fails. One that fails or hangs is no progress: only an item
    that was encoded ends it.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def out_s(self, info: EncoderInfo, not_before: float) -> float | None:
        """Seconds since it was put out, or since the Unix time `not_before`; None while it is in."""
        known = info.id in self._since
        if info.state != "ejected" and not (known and info.reason == ON_TRIAL):
            self.forget(info.id)
            return None
        since = self._since.setdefault(info.id, info.since)
        return time.time() - max(since, not_before)

    def forget(self, name: str) -> None:
        """A new life begins afresh."""
        self._since.pop(name, None)

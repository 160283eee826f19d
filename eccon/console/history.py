"""Time series for charts: what the state's figures were, in buckets of a fixed width, kept in memory."""

from collections import deque
from collections.abc import Mapping
from itertools import islice

from eccon.model import ClusterState, Role

__all__ = ["BUCKET_S", "History", "Series"]

BUCKET_S = 2.0
KEPT = 900
"""Buckets: half an hour."""

RATE_OVER_S = 10.0


class Series:
    """The last values of one figure, one a bucket; a bucket without a value repeats nothing: it is 0."""

    __slots__ = ("_at", "_values")

    def __init__(self) -> None:
        self._at = 0
        self._values: deque[float] = deque(maxlen=KEPT)

    def put(self, bucket: int, value: float) -> None:
        """The value of a bucket; a later one in the same bucket wins."""
        if self._values and bucket <= self._at:
            self._values[-1] = value
            return
        if self._values:
            self._values.extend([0.0] * min(bucket - self._at - 1, KEPT))
        self._values.append(value)
        self._at = bucket

    def last(self, n: int, step: int = 1) -> list[float]:
        """The last `n` points, each the largest of `step` buckets; aligned, so that old points stay."""
        if not self._values:
            return []
        seen = min(len(self._values), (n + 1) * step)  # the rest lies before the first point
        values = list(islice(reversed(self._values), seen))[::-1]
        start = self._at - seen + 1
        points: dict[int, float] = {}
        for i, value in enumerate(values):
            key = (start + i) // step
            points[key] = max(points.get(key, 0.0), value)
        newest = self._at // step
        return [points.get(k, 0.0) for k in range(newest - n + 1, newest + 1)]


class History:
    """Series of a cluster, fed with each state that is drawn."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self._items: dict[str, deque[tuple[float, int]]] = {}

    def feed(self, state: ClusterState, now: float) -> None:
        """Notes the figures of `state` as those of `now`."""
        bucket = int(now / BUCKET_S)
        info = state.cluster
        self._put("requests", bucket, info.requests_per_s)
        self._put("items", bucket, info.items_per_s)
        self._put("inflight", bucket, float(info.inflight))
        self._put("queued", bucket, float(info.queued))
        self._put("encoding", bucket, float(sum(p.encoder.inflight for p in state.processes if p.encoder)))
        self._put("tokens", bucket, sum(p.engine.generated_per_s or 0.0 for p in state.processes if p.engine))
        self._put("staged", bucket, float(sum(p.encoder.staged for p in state.processes if p.encoder)))
        self._put("ttft", bucket, info.ttft.p50 if info.ttft else 0.0)
        self._put("ttft99", bucket, info.ttft.p99 if info.ttft else 0.0)
        self._put("transfer", bucket, info.transfer.total.p50 if info.transfer else 0.0)
        self._put("transfer99", bucket, info.transfer.total.p99 if info.transfer else 0.0)
        names = set()
        for p in state.processes:
            names.add(p.name)
            if p.cpu_percent is not None:
                self._put(f"cpu:{p.name}", bucket, p.cpu_percent)
            if p.rss_bytes is not None:
                self._put(f"rss:{p.name}", bucket, float(p.rss_bytes))
            if use := [n.util_percent for n in p.npus if n.util_percent is not None]:
                self._put(f"npu:{p.name}", bucket, sum(use) / len(use))
            if p.role is Role.ENCODER and p.encoder is not None:
                self._count(p.name, now, p.encoder.items)
                self._put(f"items:{p.name}", bucket, self.rate(p.name))
                self._put(f"held:{p.name}", bucket, float(p.encoder.inflight + p.encoder.staged))
        for name in self._items.keys() - names:
            del self._items[name]
        for key in [k for k in self.series if ":" in k and k.partition(":")[2] not in names]:
            del self.series[key]

    def get(self, key: str) -> Series:
        """The series of that name; an empty one when nothing was noted yet."""
        return self.series.get(key) or Series()

    def rate(self, name: str) -> float:
        """Items a second of an encoder over the last seconds."""
        points = self._items.get(name)
        if not points or len(points) < 2:
            return 0.0
        (t0, n0), (t1, n1) = points[0], points[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0

    def rates(self) -> Mapping[str, float]:
        """`rate` of all encoders."""
        return {name: self.rate(name) for name in self._items}

    def _put(self, key: str, bucket: int, value: float) -> None:
        self.series.setdefault(key, Series()).put(bucket, value)

    def _count(self, name: str, now: float, n: int) -> None:
        points = self._items.setdefault(name, deque())
        if points and n < points[-1][1]:
            points.clear()  # its proxy was restarted and counts from 0
        points.append((now, n))
        while len(points) > 2 and points[1][0] < now - RATE_OVER_S:
            points.popleft()

"""Connector events of both sides, matched by identity: how long each item took from encoder to PD."""

import time
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from eccon.model import ConnectorCounts, Quantiles, Transfer
from eccon.signals.connector import ItemEvent, Step
from eccon.signals.histogram import Recent
from eccon.signals.histogram import quantiles as merged

__all__ = ["Delivery", "Latencies", "Transfers", "quantiles"]

OPEN_MAX = 8192
"""Items under way that are remembered; the oldest give way."""
PULL_MAX_S = 40.0
"""The connector gives a pull up after 30 s (vllm-rbln 0.12), whether or not the PD outlives that."""
GONE = ""
"""Whose latencies those of encoders that left are."""
COUNTED: dict[Step, str] = {
    "pushed": "pushed",
    "acked": "acked",
    "evicted": "evicted",
    "received": "received",
    "complete": "completed",
}


class Delivery(msgspec.Struct, frozen=True):
    """One item that arrived. Unix times."""

    mm_hash: str
    encoder: str
    pushed: float
    received: float
    initiated: float
    complete: float

    @property
    def push_ms(self) -> float:
        """Pushed to received; both logs round, so it may not be negative."""
        return max(0.0, self.received - self.pushed) * 1000

    @property
    def wait_ms(self) -> float:
        """Received until the PD's next step pulls it."""
        return max(0.0, self.initiated - self.received) * 1000

    @property
    def pull_ms(self) -> float:
        """Pull initiated to complete."""
        return max(0.0, self.complete - self.initiated) * 1000


class Latencies(msgspec.Struct):
    """Of one encoder's deliveries. Persisted."""

    total: Recent = msgspec.field(default_factory=Recent)
    push: Recent = msgspec.field(default_factory=Recent)
    wait: Recent = msgspec.field(default_factory=Recent)
    pull: Recent = msgspec.field(default_factory=Recent)

    def add(self, d: Delivery) -> None:
        """One delivery more."""
        self.total.add(d.push_ms + d.pull_ms, d.complete)
        self.push.add(d.push_ms, d.complete)
        self.wait.add(d.wait_ms, d.complete)
        self.pull.add(d.pull_ms, d.complete)

    def absorb(self, other: "Latencies") -> None:
        """Those of another one, too."""
        self.total.absorb(other.total)
        self.push.absorb(other.push)
        self.wait.absorb(other.wait)
        self.pull.absorb(other.pull)


class Transfers:
    """Takes events in any order (each process's log is read on its own), gives deliveries and quantiles.

    Args:
        latencies: those of the daemon before, by encoder; they go on.
    """

    def __init__(self, latencies: dict[str, Latencies] | None = None) -> None:
        self.latencies = latencies if latencies is not None else {}
        self._open: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._encoder: dict[str, str] = {}
        self._fresh: set[str] = set()
        """Items of which something is news."""
        self._pulling: dict[str, float] = {}
        """Since when the PD has been pulling an item."""
        self._counts: dict[str, dict[str, int]] = {}

    def feed(self, process: str, event: ItemEvent, *, old: bool = False) -> Delivery | None:
        """Takes one event that stood in the log of `process`; a delivery when it was the last one missing.

        Args: old: read again, for the traces' sake; a delivery that is old as a whole counts no more.
        """
        if not old and event.step in COUNTED:
            counts = self._counts.setdefault(process, {})
            name = COUNTED[event.step]
            counts[name] = counts.get(name, 0) + 1
        if event.step in {"acked", "evicted"}:
            return None
        steps = self._open.setdefault(event.mm_hash, {})
        self._open.move_to_end(event.mm_hash)
        steps[event.step] = event.at
        if not old:
            self._fresh.add(event.mm_hash)
        if event.step == "pushed":
            self._encoder[event.mm_hash] = process
        if event.step == "initiated" and "complete" not in steps:
            self._pulling[event.mm_hash] = event.at
        elif event.step == "complete":
            self._pulling.pop(event.mm_hash, None)
        if len(steps) < 4:
            while len(self._open) > OPEN_MAX:
                self._forget_item(next(iter(self._open)))
            return None
        encoder, fresh = self._encoder[event.mm_hash], event.mm_hash in self._fresh
        self._forget_item(event.mm_hash)
        delivery = Delivery(event.mm_hash, encoder, **steps)
        if fresh:
            self.latencies.setdefault(encoder, Latencies()).add(delivery)
        return delivery

    def of(self, encoder: str) -> Transfer | None:
        """Quantiles of one encoder's deliveries of the last hour; None without any."""
        return _transfer([self.latencies[encoder]] if encoder in self.latencies else [])

    def overall(self) -> Transfer | None:
        """Quantiles over all encoders."""
        return _transfer(self.latencies.values())

    def counts(self, process: str) -> ConnectorCounts | None:
        """What its connector told; None when nothing."""
        found = self._counts.get(process)
        return None if found is None else ConnectorCounts(**found)

    def pulling_s(self, now: float | None = None) -> dict[str, float]:
        """Seconds that the PD's oldest unfinished pull from each encoder has lasted."""
        now = time.time() if now is None else now
        found: dict[str, float] = {}
        for mm_hash in [h for h, since in self._pulling.items() if now - since > PULL_MAX_S]:
            self._forget_item(mm_hash)
        for mm_hash, since in self._pulling.items():
            if encoder := self._encoder.get(mm_hash):
                found[encoder] = max(found.get(encoder, 0.0), now - since)
        return found

    def pd_ended(self) -> None:
        """What it was pulling it will never finish."""
        for mm_hash in list(self._pulling):
            self._forget_item(mm_hash)

    def forget(self, encoder: str) -> None:
        """An encoder that left; what it delivered still counts in the whole."""
        self._counts.pop(encoder, None)
        if left := self.latencies.pop(encoder, None):
            self.latencies.setdefault(GONE, Latencies()).absorb(left)

    def _forget_item(self, mm_hash: str) -> None:
        self._open.pop(mm_hash, None)
        self._encoder.pop(mm_hash, None)
        self._fresh.discard(mm_hash)
        self._pulling.pop(mm_hash, None)


def quantiles(samples: Iterable[float]) -> Quantiles | None:
    """Of milliseconds, by nearest rank, to 0.1 ms; None of nothing."""
    ordered = sorted(samples)
    if not ordered:
        return None
    last = len(ordered) - 1
    p50, p99 = ordered[round(last * 0.5)], ordered[round(last * 0.99)]
    return Quantiles(len(ordered), round(p50, 1), round(p99, 1))


def _transfer(parts: Iterable[Latencies]) -> Transfer | None:
    rows, now = tuple(parts), time.time()
    total = merged((r.total for r in rows), now)
    push = merged((r.push for r in rows), now)
    wait = merged((r.wait for r in rows), now)
    pull = merged((r.pull for r in rows), now)
    if push is None or wait is None or pull is None or total is None:
        return None
    return Transfer(total=total, push=push, wait=wait, pull=pull)

"""Connector events of both sides, matched by identity: how long each item took from encoder to PD."""

from collections import OrderedDict, deque
from collections.abc import Iterable

import msgspec

from eccon.model import Quantiles, Transfer
from eccon.signals.connector import ItemEvent

__all__ = ["Delivery", "Transfers", "quantiles"]

OPEN_MAX = 8192
"""Items under way that are remembered; the oldest give way."""
WINDOW = 1000
"""Deliveries that the quantiles are of, for each encoder."""


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


class Transfers:
    """Takes events in any order (each process's log is read on its own), gives deliveries and quantiles."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._encoder: dict[str, str] = {}
        self._done: dict[str, deque[Delivery]] = {}
        self._all: deque[Delivery] = deque(maxlen=2 * WINDOW)

    def feed(self, process: str, event: ItemEvent) -> Delivery | None:
        """Takes one event that stood in the log of `process`; a delivery when it was the last one missing."""
        if event.step == "acked":
            return None
        steps = self._open.setdefault(event.mm_hash, {})
        self._open.move_to_end(event.mm_hash)
        steps[event.step] = event.at
        if event.step == "pushed":
            self._encoder[event.mm_hash] = process
        if len(steps) < 4:
            while len(self._open) > OPEN_MAX:
                old, _ = self._open.popitem(last=False)
                self._encoder.pop(old, None)
            return None
        del self._open[event.mm_hash]
        encoder = self._encoder.pop(event.mm_hash)
        delivery = Delivery(event.mm_hash, encoder, **steps)
        self._done.setdefault(encoder, deque(maxlen=WINDOW)).append(delivery)
        self._all.append(delivery)
        return delivery

    def of(self, encoder: str) -> Transfer | None:
        """Quantiles of one encoder's recent deliveries; None until the first."""
        return _transfer(self._done.get(encoder, ()))

    def overall(self) -> Transfer | None:
        """Quantiles over all encoders."""
        return _transfer(self._all)

    def forget(self, encoder: str) -> None:
        """An encoder that left."""
        self._done.pop(encoder, None)


def quantiles(samples: Iterable[float]) -> Quantiles | None:
    """Of milliseconds, by nearest rank, to 0.1 ms; None of nothing."""
    ordered = sorted(samples)
    if not ordered:
        return None
    last = len(ordered) - 1
    p50, p99 = ordered[round(last * 0.5)], ordered[round(last * 0.99)]
    return Quantiles(len(ordered), round(p50, 1), round(p99, 1))


def _transfer(done: Iterable[Delivery]) -> Transfer | None:
    rows = tuple(done)
    push = quantiles(d.push_ms for d in rows)
    wait = quantiles(d.wait_ms for d in rows)
    pull = quantiles(d.pull_ms for d in rows)
    total = quantiles(d.push_ms + d.pull_ms for d in rows)
    if push is None or wait is None or pull is None or total is None:
        return None
    return Transfer(total=total, push=push, wait=wait, pull=pull)

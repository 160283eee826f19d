"""Whose fault it is that encoders answer an item with 5xx: theirs, or the item's own.

vLLM 0.30 answers 500 for what a client has written: an image at an address where nobody listens, a file
that it may not read. Every encoder does, and if each such answer were held against it like any other, one
client with a dead link would take all of them out. So the failures of one request count once at each
encoder until its items have been encoded elsewhere; and when several encoders fail items of one request,
those that are about to be ejected are asked at once to encode an image of ours, which decides.
"""

import asyncio
from collections.abc import Callable

from eccon_proxy.encoders import Encoder
from eccon_proxy.metrics import Metrics

__all__ = ["Charges"]


class _Charge:
    __slots__ = ("counted", "encoder", "reason", "since")

    def __init__(self, encoder: Encoder, reason: str, since: float) -> None:
        self.encoder = encoder
        self.reason = reason
        self.since = since
        """Loop time at which the visit began."""
        self.counted = False


class Charges:
    """The 5xx answers that the items of one request got."""

    def __init__(self, items: int, metrics: Metrics, acquit: Callable[[Encoder], None]) -> None:
        self._of: list[list[_Charge]] = [[] for _ in range(items)]
        self._counted: set[Encoder] = set()
        self._metrics = metrics
        self._acquit = acquit

    def bring(self, position: int, encoder: Encoder, reason: str, since: float) -> None:
        """An encoder answered the item at `position` with 5xx, in a visit that began at loop time `since`."""
        charge = _Charge(encoder, reason, since)
        charges = self._of[position]
        charges.append(charge)
        alone = all(c.encoder is encoder for c in charges)
        if alone or not encoder.acquitted:
            self._count(charge)
        if alone:
            return
        for c in charges:
            if c.counted and c.encoder.acquitted:
                c.encoder.forgive()
                c.counted = False

    def encoded(self, position: int) -> None:
        """The item was encoded after all: whoever failed it did so by a fault of its own."""
        for charge in self._of[position]:
            if not charge.counted:
                self._convict(charge)
        self._of[position].clear()

    def _count(self, charge: _Charge) -> None:
        if charge.encoder not in self._counted:
            self._counted.add(charge.encoder)
            self._convict(charge)
            if len(self._counted) > 1:
                for encoder in self._counted:
                    if encoder.endangered:
                        self._acquit(encoder)

    def _convict(self, charge: _Charge) -> None:
        charge.counted = True
        now = asyncio.get_running_loop().time()
        if charge.encoder.failed(charge.reason, now, since=charge.since):
            self._metrics.ejections.add(charge.encoder.id)

"""How much work an item is, in the units of the policy."""

from eccon_proxy.imagesize import pixels
from eccon_proxy.plan import Item, Plan

__all__ = ["Weights"]

GUESS = 1_000_000.0
"""Pixels of the first image whose size is not known."""
SMOOTH = 0.05


class Weights:
    """Pixels of each item; an unknown size counts as the running mean of the known ones."""

    def __init__(self, policy: str) -> None:
        self._count_pixels = policy == "least_work"
        self._mean = GUESS
        self._known = 0

    def of(self, plan: Plan, item: Item) -> float:
        """The weight of one item; 1 when the policy does not ask."""
        if not self._count_pixels:
            return 1.0
        size = pixels(plan, item)
        if size is None:
            return self._mean
        self._known += 1
        share = max(SMOOTH, 1.0 / self._known)
        self._mean += share * (size - self._mean)
        return float(size)

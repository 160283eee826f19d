"""When a process that died is started again. Pure."""

import random

import msgspec

from eccon.config import Supervisor

__all__ = ["Backoff"]


class Backoff(msgspec.Struct):
    """Deaths in a row of one process. Persisted, so that a new daemon goes on counting."""

    deaths: int = 0

    def died(self, policy: Supervisor, healthy_s: float) -> float | None:
        """Counts a death after `healthy_s` of being ready. Seconds until the next try; None: give up."""
        if healthy_s >= policy.backoff_reset_s:
            self.deaths = 0
        self.deaths += 1
        if self.deaths >= policy.failures:
            return None
        wait = min(policy.backoff_max_s, policy.backoff_s * 2.0 ** (self.deaths - 1))
        return wait * random.uniform(0.75, 1.0)

    def reset(self) -> None:
        """An operator wants it to be tried afresh."""
        self.deaths = 0

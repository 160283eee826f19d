"""How far the start of a life has come, by the steps that its log showed, and how long it will still take."""

import time

from eccon.model import Milestone, Role
from eccon.signals.milestones import History, Step

__all__ = ["StartProgress"]


class StartProgress:
    """Of one process, over its lives. `history` is of earlier starts of the same role.

    Args: adopted: its present life began under an earlier daemon, which knew when its steps were reached.
    """

    def __init__(self, history: History, role: Role, *, adopted: bool) -> None:
        self._history = history
        self._role = role.value
        self._adopted = adopted
        self._reached: dict[str, float] = {}
        self._step: Step | None = None
        self._step_at = 0.0

    def begin(self) -> None:
        """A new life."""
        self._reached, self._step, self._adopted = {}, None, False

    def reach(self, step: Step, started_at: float) -> bool:
        """Takes a step of the life that began then (Unix time). False when it is no further than before."""
        if self._step and step.fraction <= self._step.fraction:
            return False
        now = time.time()
        self._step, self._step_at = step, now
        if not self._adopted:
            self._reached.setdefault(step.text, now - started_at)
        return True

    @property
    def milestones(self) -> tuple[tuple[str, float], ...]:
        """Steps reached, with seconds since the start."""
        return tuple((text, round(at, 1)) for text, at in self._reached.items())

    def estimate(self, started_at: float) -> Milestone:
        """The latest step with the seconds that are left. Coarse, so that it rarely changes."""
        text = self._step.text if self._step else "starting"
        since = time.time() - (self._step_at if self._step else started_at)
        left = self._history.remaining(self._role, self._step.text if self._step else None, since)
        eta = None if left is None else float(round(left) if left < 20 else 5 * round(left / 5))
        fraction = round(self._step.fraction, 2) if self._step else 0.0
        return Milestone(text=text, fraction=fraction, eta_s=eta)

    def ready(self, after_s: float) -> str:
        """It is found ready: remembered, unless it may have been so before this daemon came. In words."""
        if self._adopted:
            return "ready; when it became so was not seen"
        self._history.add(self._role, self._reached, after_s)
        return f"ready after {after_s:.1f} s"

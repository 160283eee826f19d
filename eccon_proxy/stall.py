"""Whether a PD that answers its probes still moves: its engine may be blocked behind a good `/health`.

It is stalled when no request at it had a byte for some time, a one-token text request (the *canary*) is
late as well, and vLLM's own counters stand still meanwhile: in a full PD the canary waits in line, but the
counters move. Measured with vLLM 0.30: a PD that waits for an item that nobody pushed answers `/health` in
milliseconds, shows the same counters for 30 s, and exits.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from eccon_proxy.vitals import Vitals

__all__ = ["Watchdog"]

LATE = 0.5
"""A canary is late after this share of the silence that it was sent for."""


class Watchdog:
    """Looks at one PD now and then. Times are the loop's, in seconds."""

    def __init__(self, after: float, ask: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        self._after = after
        self._ask = ask
        self._canary: asyncio.Task[bool] | None = None
        self._since = 0.0
        """When the canary was sent, or the counters were last seen to move, or it came back."""
        self._vitals: Vitals | None = None
        self.stalled = False

    def look(self, now: float, last: float | None, vitals: Vitals | None) -> bool:
        """Whether it is stalled. `last` is the newest byte of any request at it; None without requests."""
        if self._canary is not None and self._canary.done():
            if not self._canary.cancelled() and self._canary.result():
                self._since = now
            self._canary = None
            self.stalled = False
        if self._canary is not None:
            if (last is not None and last > self._since) or (vitals is not None and vitals != self._vitals):
                self._since, self._vitals = now, vitals
                self.stalled = False
            elif now - self._since > self._after * LATE and (last is not None or self.stalled):
                self.stalled = True
        elif last is not None and now - max(last, self._since) > self._after:
            self._since, self._vitals = now, vitals
            self._canary = asyncio.get_running_loop().create_task(self._ask())
        return self.stalled

    def forget(self) -> None:
        """It is down, or nobody asks any more."""
        if self._canary is not None:
            self._canary.cancel()
            self._canary = None
        self.stalled = False

"""Which requests must wait, how long, and which have waited in vain. Pure: time comes from outside."""

import time
from collections.abc import Callable, Sequence

__all__ = ["Gate"]


class Gate:
    """Requests by id. `look` says of one missing thing why it will not come, or that it may still."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        self._failed: dict[str, str] = {}
        self._told: set[str] = set()

    @property
    def waiting(self) -> bool:
        """Whether any request waits."""
        return bool(self._since)

    def check(self, request_id: str, missing: Sequence[str], lost: str, wait_s: float) -> bool:
        """Whether a request may be scheduled now.

        `missing` is what it still waits for; `lost` says why some of that will never come.
        """
        if request_id in self._told or request_id in self._failed:
            return False
        if not missing:
            self._since.pop(request_id, None)
            return True
        now = self._clock()
        since = self._since.setdefault(request_id, now)
        if lost:
            self._fail(request_id, lost)
        elif now - since >= wait_s:
            self._fail(request_id, f"{missing[0]} did not come within {wait_s:g} s")
        return False

    def fail(self, request_id: str, reason: str) -> None:
        """Fail a request from outside, once."""
        if request_id not in self._told:
            self._fail(request_id, reason)

    def take(self) -> dict[str, str]:
        """Requests to be failed now, with the reason; each is told once."""
        failed, self._failed = self._failed, {}
        self._told.update(failed)
        return failed

    def first_seen(self, request_id: str) -> bool:
        """Whether a request has not waited yet."""
        return request_id not in self._since

    def forget(self, request_id: str) -> None:
        """A request has ended, in whatever way."""
        self._since.pop(request_id, None)
        self._failed.pop(request_id, None)
        self._told.discard(request_id)

    def _fail(self, request_id: str, reason: str) -> None:
        self._since.pop(request_id, None)
        self._failed[request_id] = reason

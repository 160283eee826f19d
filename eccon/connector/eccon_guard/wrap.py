"""Makes a scheduler that does not ask the connector ask it, by wrapping its class's `schedule` in memory.

Requests that must wait are taken out of the queues for the length of the call. Nothing else is touched.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from .log import logger

__all__ = ["install"]

MARK = "_eccon_guard"
QUEUES = ("waiting", "skipped_waiting")


class _Queue(Protocol):
    def __iter__(self) -> Iterator[Any]: ...
    def remove_requests(self, requests: Iterable[Any]) -> None: ...
    def prepend_request(self, request: Any) -> None: ...


def install(scheduler: Any) -> None:
    """Wrap `schedule` of this class, once."""
    original = scheduler.schedule
    if getattr(original, MARK, False):
        return

    @functools.wraps(original)
    def schedule(self: Any, *args: object, **kwargs: object) -> object:
        held = _take_out(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            for queue, requests in held:
                for request in reversed(requests):
                    queue.prepend_request(request)

    setattr(schedule, MARK, True)
    scheduler.schedule = schedule


def _take_out(scheduler: Any) -> list[tuple[_Queue, list[Any]]]:
    """Requests that the connector does not let pass yet, by queue."""
    connector = scheduler.ec_connector
    held: list[tuple[_Queue, list[Any]]] = []
    if connector is None or getattr(connector, "guard_level", "") != "wrap":
        return held
    for name in QUEUES:
        queue: _Queue = getattr(scheduler, name)
        wait = [
            r for r in queue
            if r.mm_features and not connector.ensure_cache_available(r, r.num_computed_tokens)
        ]  # fmt: skip
        if wait:
            try:
                queue.remove_requests(wait)
            except Exception:  # noqa: BLE001  a scheduler that asks too early is better than none
                logger.exception("EC guard: requests could not be held back")
                continue
            held.append((queue, wait))
    return held

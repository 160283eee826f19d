"""How much may be under way: counted rooms with a first-come queue and a bounded wait."""

import asyncio
from collections import deque

__all__ = ["Room"]


class Room:
    """So many places, taken several at a time, in order of arrival."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def take_now(self, count: int = 1) -> bool:
        """Take places when they are free and nobody waits."""
        if self._queue or self.taken + count > self.size:
            return False
        self.taken += count
        return True

    async def take(self, count: int, wait: float) -> None:
        """Take places, waiting at most `wait` seconds; raises `asyncio.TimeoutError` or what `fail` says."""
        if self.take_now(count):
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        entry = (count, future)
        self._queue.append(entry)
        timer = loop.call_later(wait, self._late, entry)
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.give(count)  # cancelled in the very turn in which the places were given
            elif entry in self._queue:
                self._queue.remove(entry)
                self._serve()
            raise
        finally:
            timer.cancel()
            # It holds what was raised, whose traceback holds this frame and the callers' with their bodies.
            del future, entry

    def _late(self, entry: tuple[int, "asyncio.Future[None]"]) -> None:
        if entry in self._queue:
            self._queue.remove(entry)
            entry[1].set_exception(asyncio.TimeoutError())
            self._serve()

    def give(self, count: int = 1) -> None:
        """Give places back."""
        self.taken -= count
        self._serve()

    def fail(self, error: Exception) -> None:
        """Send everyone in the queue away."""
        queue, self._queue = self._queue, deque()
        for _, future in queue:
            if not future.done():
                future.set_exception(error)

    def _serve(self) -> None:
        while self._queue and self.taken + self._queue[0][0] <= self.size:
            count, future = self._queue.popleft()
            if not future.done():
                self.taken += count
                future.set_result(None)

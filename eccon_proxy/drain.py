"""Takes an encoder out of service without hurting anyone: the PD dies of one that goes with items staged.

First no more items go there; what is being encoded ends, or goes elsewhere at once; requests that wait at
the gate encode again elsewhere; those at the PD get their first byte; then a one-token request makes the
PD empty its queue of what nobody will fetch.
"""

import asyncio

from eccon_proxy.core import Core
from eccon_proxy.encoders import ORPHAN_SECONDS, Encoder

__all__ = ["Drains"]

LOOK_EVERY = 0.05
FLUSH_RETRY = 1.0
FLUSH_TRIES_NOW = 3


class Drains:
    """Drains under way."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._removing: set[str] = set()

    def begin(self, encoder: Encoder, *, now: bool, remove: bool = False) -> None:
        """Start to drain an encoder; with `now` its items are sent elsewhere at once."""
        running = self._tasks.get(encoder.id)
        if remove:
            self._removing.add(encoder.id)
        if encoder.drained and running is None:
            if remove:
                self._leave(encoder)
            return
        if running is not None:
            if not now:
                return
            running.cancel()
        if not encoder.leaving:
            encoder.leaving = True
            encoder.settle("draining")
            encoder.group.changed()
        task = asyncio.get_running_loop().create_task(self._drain(encoder, now=now))
        self._tasks[encoder.id] = task
        task.add_done_callback(lambda t: self._ended(encoder, t))

    def removes(self, encoder: Encoder) -> bool:
        """Whether it leaves when it is drained."""
        return encoder.id in self._removing

    def resume(self, encoder: Encoder) -> None:
        """Give it work again."""
        self._removing.discard(encoder.id)
        task = self._tasks.pop(encoder.id, None)
        if task is not None:
            task.cancel()
        if encoder.leaving:
            encoder.leaving = encoder.drained = False
            encoder.settle("")
            encoder.group.changed()

    async def remove(self, encoder: Encoder, *, now: bool) -> None:
        """Take it out of the pool: at once when idle or `now`, else when it is drained."""
        if now:
            task = self._tasks.pop(encoder.id, None)
            if task is not None:
                task.cancel()
            self._leave(encoder)
            return
        self.begin(encoder, now=False, remove=True)
        task = self._tasks.get(encoder.id)
        if task is not None and not encoder.inflight and not encoder.held():
            await asyncio.wait([task], timeout=5.0)

    async def close(self) -> None:
        """End all."""
        tasks = tuple(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, encoder: Encoder, task: asyncio.Task[None]) -> None:
        if self._tasks.get(encoder.id) is task:
            del self._tasks[encoder.id]
        if task.cancelled():
            return
        task.result()
        if encoder.id in self._removing:
            self._leave(encoder)

    def _leave(self, encoder: Encoder) -> None:
        self._removing.discard(encoder.id)
        if encoder.id in self._core.encoders:
            self._core.leave(encoder)

    async def _drain(self, encoder: Encoder, *, now: bool) -> None:
        pd = self._core.pd_of(encoder)
        while encoder.inflight or encoder.staged:
            if now:
                for visit in tuple(encoder.inflight):
                    visit.evict("the encoder is drained")
            for staged in tuple(encoder.staged.values()):
                if not staged.handed:  # its request waits at the gate, and encodes it again elsewhere
                    staged.void()
                    pd.orphaned(staged)
            self._say(
                encoder, f"waits for {len(encoder.inflight)} in flight, {len(encoder.staged)} at the PD"
            )
            await asyncio.sleep(LOOK_EVERY)
        tries = 0
        begun = asyncio.get_running_loop().time()
        while pd.state == "ready":
            self._say(encoder, "waits for the PD to run a one-token request")
            if await pd.flush():
                break
            tries += 1
            if now and tries >= FLUSH_TRIES_NOW:
                break
            await asyncio.sleep(FLUSH_RETRY)
            # Where the PD does not run our request (a key we lack), any client's does as well; and what
            # nobody fetched for a minute is gone by itself.
            if encoder.group.flushed_at > begun or asyncio.get_running_loop().time() > begun + ORPHAN_SECONDS:
                break
        encoder.drained = True
        encoder.settle("drained")

    def _say(self, encoder: Encoder, reason: str) -> None:
        if encoder.reason != reason:
            encoder.settle(reason)

"""The encoders that push to one PD, and who of them gets the next item."""

import asyncio
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator

from eccon_proxy.encoders import Encoder
from eccon_proxy.settings import Settings

__all__ = ["Group"]

AFFINITY_BOUND = 1.25
"""An encoder takes content that is its own up to so many times the mean load."""


class _Waiter:
    __slots__ = ("exclude", "future", "key", "weight")

    def __init__(self, exclude: set[str], weight: float, key: bytes) -> None:
        self.exclude = exclude
        self.key = key
        self.weight = weight
        self.future: asyncio.Future[Encoder | None] = asyncio.get_running_loop().create_future()


class Group:
    """The encoders that push to one PD."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.members: list[Encoder] = []
        self.open_members = 0
        self.pd_ready = False
        """Whether the PD takes what is pushed to it."""
        self.flushed_at = 0.0
        """Loop time before which whatever was pushed has been taken from the PD's queue."""
        self._cursor = 0
        self._waiting: deque[_Waiter] = deque()

    def __iter__(self) -> Iterator[Encoder]:
        return iter(self.members)

    def add(self, encoder: Encoder) -> None:
        """Take a member in."""
        self.members.append(encoder)

    def remove(self, encoder: Encoder) -> None:
        """Let a member go."""
        self.members.remove(encoder)
        self.count()
        self.changed()

    def count(self) -> None:
        """Note how many members are open, after a change of one."""
        self.open_members = sum(e.open for e in self.members)

    @property
    def capacity(self) -> int:
        """Items that the open members may hold together: with more under way, requests that each hold
        some would wait for each other's places for ever."""
        return self.settings.staged_items * self.open_members

    @property
    def waiting(self) -> int:
        """Items that wait for a free encoder."""
        return len(self._waiting)

    def any_open(self) -> bool:
        """Whether any member may be chosen."""
        return self.open_members > 0

    def possible(self, exclude: Iterable[str] = ()) -> bool:
        """Whether a member takes items, or may be about to: unprobed, due for a trial, or in one."""
        now = asyncio.get_running_loop().time()
        return any(
            (e.open and not (e.on_trial and e.taken))
            or (e.answers is None and not e.leaving)
            or e.trial_due(now)
            or e.accused
            for e in self.members
            if e.id not in exclude
        )

    async def acquire(
        self, exclude: set[str], weight: float, wait: float, key: bytes = b""
    ) -> Encoder | None:
        """Take a slot at an encoder, waiting at most `wait` seconds; None when there is none to wait for.

        `key` names the content, for the policy that sends the same content to the same encoder.

        Raises `asyncio.TimeoutError` when all stayed full. `release` gives the slot back.
        """
        encoder = None if self._waiting else self._choose(exclude, key)
        if encoder is None:
            encoder = await self._wait(exclude, weight, wait, key)
        else:
            self.take(encoder, weight)
        return encoder

    async def _wait(self, exclude: set[str], weight: float, wait: float, key: bytes) -> Encoder | None:
        waiter = _Waiter(exclude, weight, key)
        self._waiting.append(waiter)
        timer = asyncio.get_running_loop().call_later(wait, self._late, waiter)
        self.changed()
        try:
            return await waiter.future
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                # Cancelled in the very turn in which a slot was given.
                encoder = waiter.future.result()
                if encoder is not None:
                    self.release(encoder, weight)
            raise
        finally:
            timer.cancel()
            del waiter  # it holds what was raised, whose traceback holds this frame

    def _late(self, waiter: _Waiter) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            waiter.future.set_exception(asyncio.TimeoutError())

    def release(self, encoder: Encoder, weight: float) -> None:
        """Give a slot back."""
        encoder.taken -= 1
        encoder.work -= weight
        if self._waiting:
            self.changed()

    def changed(self) -> None:
        """Serve those who wait, in order, after anything that may have made room or taken hope."""
        for waiter in tuple(self._waiting):
            encoder = self._choose(waiter.exclude, waiter.key)
            if encoder is not None:
                self.take(encoder, waiter.weight)
            elif self.possible(waiter.exclude):
                continue
            self._waiting.remove(waiter)
            if not waiter.future.done():
                waiter.future.set_result(encoder)

    def due_for_trial(self, exclude: set[str]) -> Encoder | None:
        """An ejected member that one item should try."""
        now = asyncio.get_running_loop().time()
        for e in self.members:
            if e.ejected_until is not None and e.id not in exclude and e.trial_due(now):
                return e
        return None

    def take(self, encoder: Encoder, weight: float) -> None:
        """Take a slot at this very encoder."""
        encoder.taken += 1
        encoder.work += weight

    def idle(self, exclude: set[str]) -> Encoder | None:
        """An open member with nothing to do."""
        for e in self.members:
            if e.open and not e.taken and e.id not in exclude and e.has_room():
                return e
        return None

    def _choose(self, exclude: set[str], key: bytes) -> Encoder | None:
        if not self.members:
            return None
        policy = self.settings.policy
        if policy == "affinity" and key:
            found = self._nearest(exclude, key)
        elif policy in {"round_robin", "affinity"} and not exclude:
            found = self._next(exclude)
        else:  # a second try goes where least is, and does not move the turn
            found = self._least(exclude, work=policy == "least_work")
        if found is None and not any(e.open and e.id not in exclude for e in self.members):
            found = self.due_for_trial(exclude)
            if found is not None:
                found.half_open()
        return found

    def _next(self, exclude: set[str]) -> Encoder | None:
        members = self.members
        for i in range(len(members)):
            e = members[(self._cursor + i) % len(members)]
            if e.open and e.has_room() and e.id not in exclude:
                self._cursor = (self._cursor + i + 1) % len(members)
                return e
        return None

    def _nearest(self, exclude: set[str], key: bytes) -> Encoder | None:
        """Rendezvous hashing with a load bound: the first in the content's own order that is not overrun."""
        members = [e for e in self.members if e.open and e.id not in exclude]
        bound = AFFINITY_BOUND * (1 + sum(e.taken for e in members)) / max(1, len(members))
        best: Encoder | None = None
        best_rank = b""
        for e in members:
            rank = hashlib.blake2b(e.id.encode(), digest_size=8, key=key[:64]).digest()
            if (best is None or rank > best_rank) and e.taken <= bound and e.has_room():
                best, best_rank = e, rank
        return best

    def _least(self, exclude: set[str], *, work: bool) -> Encoder | None:
        members = self.members
        best: Encoder | None = None
        best_load = 0.0
        best_at = 0
        for i in range(len(members)):
            at = (self._cursor + i) % len(members)
            e = members[at]
            if not e.open or e.id in exclude:
                continue
            load = e.work if work else float(e.taken)
            if (best is None or load < best_load) and e.has_room():
                best, best_load, best_at = e, load, at
        if best is not None and not exclude:
            self._cursor = (best_at + 1) % len(members)
        return best

"""One encoder: its state, what it is doing, what it holds.

An encoder is *open* when it may be chosen. Probes (see `probes`) say whether it answers; a breaker
counts encodes that fail, whatever its `/health` says. What an encoder holds for the PD is kept as
`Staged` items until the PD has taken them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from eccon_proxy.schema import ON_TRIAL, EncoderInfo, EncoderState
from eccon_proxy.settings import Settings
from eccon_proxy.upstream import Upstream

if TYPE_CHECKING:
    from eccon_proxy.group import Group

__all__ = ["ORPHAN_SECONDS", "Encoder", "Staged", "Visit"]

ORPHAN_SECONDS = 60.0
"""The connector drops what nobody fetched after this long."""
ACQUITTED_SECONDS = 5.0
"""How long its own success with an image of ours speaks for an encoder, when others fail the same items."""
MAX_BACKOFF = 4
SAMPLES = 256
ENOUGH = 20


class Visit(Protocol):
    """One item that is being encoded."""

    fetched: bool
    """Whether the encoder may have to fetch it from somewhere: then it is slow by no fault of its own."""

    def evict(self, reason: str) -> None:
        """Send the item elsewhere."""


class Staged:
    """One item that an encoder holds for the PD."""

    __slots__ = ("at", "encoder", "handed", "key", "life", "uuid")

    def __init__(self, encoder: "Encoder", uuid: bytes, at: float, key: bytes = b"") -> None:
        self.encoder = encoder
        self.uuid = uuid
        self.key = key or uuid
        """In the encoder's books: requests may hold the same content side by side."""
        self.at = at
        self.life = encoder.life
        self.handed = False
        """Whether the request that uses it is at the PD."""

    def void(self) -> None:
        """Whoever counts on it must encode the item again."""
        self.life = -1

    def usable(self, oldest: float) -> bool:
        """Whether the PD may still be sent there for it."""
        e = self.encoder
        return self.life == e.life and self.at >= oldest and not e.leaving


class Encoder:
    """One member of a group."""

    def __init__(
        self,
        encoder_id: str,
        url: str,
        group: "Group",
        settings: Settings,
        on_change: Callable[["Encoder"], None],
    ) -> None:
        self.id = encoder_id
        self.group = group
        self.url = url
        self.upstream = Upstream(url, connect_timeout=settings.connect_timeout, ca=settings.upstream_ca)
        self.probed = Upstream(url, connect_timeout=settings.connect_timeout, ca=settings.upstream_ca)
        """The same server for probes: they take no connection that an item could use."""
        self._settings = settings
        self._on_change = on_change
        self.since = time.time()
        self.reason = "not yet probed"
        self.answers: bool | None = None
        """What the probes say; None before the first answer."""
        self.ejected_until: float | None = None
        self._ejections = 0
        self.failures = 0
        self.trial = False
        """Whether a request of the proxy's own is under way that decides about its return."""
        self.accused = False
        """Whether such a request is under way because others fail as well: it may be back at once."""
        self.acquitted_at = -ACQUITTED_SECONDS
        """Loop time at which it last encoded an image of ours."""
        self.on_trial = False
        """Whether it is back for one item, which decides."""
        self.suspect = False
        """Whether it is late with its `/health`: others get the items until it has answered."""
        self.leaving = False
        self.drained = False
        self.life = 0
        """Grows whenever what it held must be taken for lost."""
        self.open = False
        self.inflight: dict[Visit, float] = {}
        """Visits under way and the loop time of their start."""
        self.taken = 0
        """Slots taken: in flight or about to be."""
        self.staged: dict[bytes, Staged] = {}
        self._orphans: list[float] = []
        self.items = 0
        self.errors = 0
        self.work = 0.0
        """Outstanding work of the items in flight, in the units of the policy."""
        self.last_success = 0.0
        self.seconds: deque[float] = deque(maxlen=SAMPLES)

    @property
    def state(self) -> EncoderState:
        """What the admin API calls it."""
        if self.leaving:
            return "drained" if self.drained else "draining"
        if self.answers is None:
            return "probing"
        if not self.answers:
            return "down"
        return "ready" if self.ejected_until is None else "ejected"

    def settle(self, reason: str | None = None) -> None:
        """Note the state after a change of anything it follows from."""
        self.open = self.answers is True and self.ejected_until is None and not self.leaving
        self.group.count()
        if reason is not None:
            self.reason = reason
            self.since = time.time()
        self._on_change(self)

    def has_room(self) -> bool:
        """Whether one more item may go there now."""
        if self.suspect or (self.on_trial and self.taken):
            return False
        s = self._settings
        return self.taken < s.encoder_concurrency and self.taken + self.held() < s.staged_items

    def held(self) -> int:
        """Items it holds for the PD, those that nobody will fetch included."""
        if self._orphans:
            oldest = max(asyncio.get_running_loop().time() - ORPHAN_SECONDS, self.group.flushed_at)
            self._orphans = [at for at in self._orphans if at > oldest]
        return len(self.staged) + len(self._orphans)

    def touched(self) -> None:
        """Its counts have changed."""
        self._on_change(self)

    # what the probes say

    def answered(self) -> None:
        """A probe was answered with 200."""
        if self.answers is not True:
            self.answers = True
            self.failures = 0
            self.ejected_until = None
            self.on_trial = False
            self._ejections = 0
            self.settle("")

    def silent(self, reason: str) -> None:
        """Probes failed often enough: it is down, and what it held is lost."""
        if self.answers is not False:
            self.answers = False
            self.on_trial = self.suspect = False
            self.lose()
            self.settle(reason)

    def close(self) -> None:
        """Close every connection."""
        self.upstream.close()
        self.probed.close()

    def lose(self) -> None:
        """Take everything it holds for lost."""
        self.life += 1
        self.staged.clear()
        self._orphans.clear()

    # what encodes say

    def succeeded(self, seconds: float, now: float) -> None:
        """An item was encoded."""
        self.items += 1
        self.failures = 0
        self.last_success = now
        self.seconds.append(seconds)
        self._ejections = 0
        self.on_trial = False
        if self.ejected_until is not None or self.reason:
            self.ejected_until = None
            self.settle(None if self.leaving else "")

    def failed(self, reason: str, now: float, *, since: float | None = None) -> bool:
        """An item failed by this encoder's fault, which took it `since` then; True when that ejected it."""
        self.errors += 1
        self.failures += 1
        if self.ejected_until is not None or self.failures >= self._settings.eject_after:
            failures = "1 failure" if self.failures == 1 else f"{self.failures} failures in a row, the last"
            return self.eject(f"{failures}: {reason}", now, since=since)
        return False

    def eject(self, reason: str, now: float, *, since: float | None = None) -> bool:
        """Take it out until a trial succeeds; True when it was in.

        It is out for longer each time, counted from when it began to fail: who waited long for a failure
        need not wait long again.
        """
        was_in = self.ejected_until is None
        backoff = min(2**self._ejections, MAX_BACKOFF)
        self._ejections += 1
        begun = now if since is None else since
        self.ejected_until = max(now, begun + self._settings.eject_seconds * backoff)
        self.on_trial = False
        self.life += 1
        self.settle(reason)
        return was_in

    @property
    def acquitted(self) -> bool:
        """Whether it has just encoded an image of ours."""
        return asyncio.get_running_loop().time() - self.acquitted_at < ACQUITTED_SECONDS

    @property
    def endangered(self) -> bool:
        """Whether it is ejected, or will be with the next failure."""
        return self.ejected_until is not None or self.failures >= max(1, self._settings.eject_after - 1)

    def forgive(self) -> None:
        """A failure that was counted was the item's fault."""
        self.failures = max(0, self.failures - 1)

    def returned(self) -> None:
        """A trial succeeded."""
        self.acquitted_at = asyncio.get_running_loop().time()
        self.failures = self._ejections = 0
        self.ejected_until = None
        self.on_trial = False
        self.settle("")

    def half_open(self) -> None:
        """Take it back for one item at a time: the next failure ejects it again, for longer."""
        self.ejected_until = None
        self.on_trial = True
        self.failures = self._settings.eject_after - 1
        self.settle(ON_TRIAL)

    def trial_due(self, now: float) -> bool:
        """Whether one item should find out if it works again."""
        return (
            self.ejected_until is not None
            and self.ejected_until <= now
            and self.answers is True
            and not self.trial
            and not self.leaving
        )

    # what it holds

    def hold(self, uuid: bytes, at: float) -> Staged:
        """Note an item that it holds for the PD."""
        key = uuid
        while key in self.staged:
            key += b"'"
        staged = self.staged[key] = Staged(self, uuid, at, key)
        return staged

    def pushed_for_nobody(self, at: float) -> None:
        """Note an item that it may have pushed and that no request will use."""
        self._orphans.append(at)
        self.touched()

    def orphan(self, staged: Staged) -> bool:
        """A staged item that its request will not use; False when that was known."""
        if self.staged.pop(staged.key, None) is None:
            return False
        self._orphans.append(staged.at)
        self.touched()
        return True

    def consumed(self, staged: Staged) -> None:
        """The PD has taken an item."""
        self.staged.pop(staged.key, None)
        if self.group.waiting:
            self.group.changed()
        self.touched()

    def p95(self) -> float | None:
        """Seconds that the slowest twentieth of its items take; None before there are enough."""
        if len(self.seconds) < ENOUGH:
            return None
        times = sorted(self.seconds)
        return times[len(times) * 95 // 100]

    def info(self) -> EncoderInfo:
        """What the admin API says of it."""
        times = sorted(self.seconds)
        oldest = min(self.inflight.values(), default=None)
        return EncoderInfo(
            id=self.id,
            url=self.url,
            state=self.state,
            reason=self.reason,
            since=self.since,
            inflight=len(self.inflight),
            staged=self.held(),
            items=self.items,
            errors=self.errors,
            oldest_inflight_s=0.0 if oldest is None else asyncio.get_running_loop().time() - oldest,
            encode_ms_p50=1000 * times[len(times) // 2] if times else None,
            encode_ms_p99=1000 * times[min(len(times) - 1, len(times) * 99 // 100)] if times else None,
        )

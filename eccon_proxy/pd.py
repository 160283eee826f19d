"""The PD: is it there, is it the same one as before, does it move; and the way of a request to it.

A *generation* is one life of the PD as the proxy saw it: it ends when the PD is seen down, when its
`process_start_time_seconds` changes, and with it everything staged is void. Whatever took part in two
such ends is refused (see `poison`).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal

from eccon_proxy.admission import Room
from eccon_proxy.encoders import Staged
from eccon_proxy.errors import Failure, busy, down, upstream
from eccon_proxy.group import Group
from eccon_proxy.metrics import Metrics
from eccon_proxy.plan import Buffer
from eccon_proxy.poison import Suspects
from eccon_proxy.schema import PDInfo
from eccon_proxy.settings import Settings
from eccon_proxy.stall import Watchdog
from eccon_proxy.upstream import Response, Upstream, UpstreamError
from eccon_proxy.vitals import Vitals, canary_body, first_model, read_vitals

__all__ = ["PD", "Forward"]

STALL_RETRY_AFTER = 30.0


class Forward:
    """One request at the PD, from its sending to the end of its answer."""

    __slots__ = ("fingerprint", "pd", "places", "response", "sent_at", "staged", "unanswered")

    def __init__(self, pd: "PD", fingerprint: int, staged: Sequence[Staged], places: int) -> None:
        self.pd = pd
        self.fingerprint = fingerprint
        self.staged = staged
        self.places = places
        """Items that count against the PD's room until the first byte."""
        self.sent_at = asyncio.get_running_loop().time()
        self.response: Response | None = None
        self.unanswered = True
        for s in staged:
            s.handed = True

    def first_byte(self, *, used: bool) -> None:
        """The first byte of the body came; `used` tells that the PD ran the request, so took its items."""
        self.unanswered = False
        pd = self.pd
        pd.alive()
        for s in self.staged:
            if used:
                s.encoder.consumed(s)
            else:
                pd.orphaned(s)
        if used and self.sent_at > pd.group.flushed_at:
            pd.group.flushed_at = self.sent_at
        if self.places:
            pd.room.give(self.places)
            self.places = 0

    def end(self, *, broken: bool = False) -> None:
        """The answer is over, or given up; `broken` tells that the PD ended it."""
        pd = self.pd
        if self.unanswered:
            for s in self.staged:
                pd.orphaned(s)
            if self.places:
                pd.room.give(self.places)
                self.places = 0
        self.staged = ()
        pd.forwards.discard(self)
        if broken:
            pd.broke(self.fingerprint)


class PD:
    """One PD and what is known of it."""

    def __init__(
        self,
        url: str,
        group: Group,
        settings: Settings,
        metrics: Metrics,
        on_change: Callable[["PD"], None],
    ) -> None:
        self.url = url
        self.group = group
        self.upstream = Upstream(url, connect_timeout=settings.connect_timeout, ca=settings.upstream_ca)
        self._probed = Upstream(url, connect_timeout=settings.connect_timeout, ca=settings.upstream_ca)
        self.room = Room(settings.pd_items)
        self.forwards: set[Forward] = set()
        self.on_down: set[Callable[[Failure], None]] = set()
        """Fan-outs under way, to be stopped when it goes down."""
        self.generation = 0
        self.epoch: float | None = None
        self.state: Literal["probing", "ready", "down", "stalled"] = "probing"
        self.reason = "not yet probed"
        self.since = time.time()
        self._settings = settings
        self._metrics = metrics
        self._on_change = on_change
        self._alive_at = 0.0
        self._suspect_at: float | None = None
        self._unasked = False
        """Whether the last probe was not even sent, for want of a descriptor."""
        self._check: asyncio.Task[None] | None = None
        self._suspects = Suspects(settings.poison_seconds)
        self._vitals: Vitals | None = None
        self._model: str | None = None
        self.asked_for: str | None = None
        """The model of the last request that it answered with 200."""
        self._watchdog = Watchdog(settings.stall_after, self.one_token)
        self._key = (
            b"authorization: Bearer %b\r\n" % settings.upstream_api_key.encode()
            if settings.upstream_api_key
            else b""
        )

    # what is known

    def info(self) -> PDInfo:
        """What the admin API says of it."""
        return PDInfo(
            url=self.url,
            state=self.state,
            reason=self.reason,
            since=self.since,
            epoch=self.epoch,
            inflight=len(self.forwards),
        )

    def alive(self) -> None:
        """It was heard now."""
        self._alive_at = asyncio.get_running_loop().time()

    def heard_since(self, moment: float) -> bool:
        """Whether any byte came from it after that loop time."""
        if self._alive_at > moment:
            return True
        return any(
            f.response is not None and f.response.active > moment for f in self.forwards if not f.unanswered
        )

    def refuse_if_away(self) -> None:
        """Raise the 503 that answers a request while it cannot serve."""
        if self.state == "down":
            raise down(f"The PD is down: {self.reason}", code="pd_down")
        if self.state == "stalled":
            message = f"The PD is stalled: {self.reason}"
            raise down(message, code="pd_stalled", retry_after=STALL_RETRY_AFTER)

    def refuse_poison(self, fingerprint: int) -> None:
        """Raise the 400 for a request that took part in too many deaths."""
        if not self._suspects:
            return
        count = self._suspects.deaths(fingerprint, asyncio.get_running_loop().time())
        if count >= self._settings.poison_deaths:
            raise Failure(
                400,
                f"The PD died {count} times with this very request in flight; it is not sent again",
                kind="invalid_request_error",
                code="poisoned_request",
            )

    def expect_restart(self, seconds: float) -> None:
        """Somebody restarts it on purpose within that time: its end counts against no request."""
        self._suspects.excuse(asyncio.get_running_loop().time() + seconds if seconds else 0.0)

    def orphaned(self, staged: Staged) -> None:
        """An item was encoded for nobody."""
        if staged.encoder.orphan(staged):
            self._metrics.orphans.add()

    # its lives

    def broke(self, fingerprint: int) -> None:
        """A connection to it broke under a request: suspect until the next probe."""
        self._suspects.broke(fingerprint, asyncio.get_running_loop().time())
        self.suspect()

    def suspect(self) -> None:
        """Ask it now whether it lives; nothing with media is sent before it has answered."""
        self._suspect_at = asyncio.get_running_loop().time()
        if self._check is None:
            self._begin_check()

    def went_down(self, reason: str, *, sure: bool = True) -> None:
        """It does not answer; not `sure` that it died when it only fell silent."""
        if self.state == "down":
            return
        if self.state != "probing":
            self._new_generation(sure=sure)
        self._turn("down", reason)
        self.room.fail(down(f"The PD is down: {reason}", code="pd_down"))
        for stop in tuple(self.on_down):
            stop(down(f"The PD went down: {reason}", code="pd_down"))

    def _came_up(self, epoch: float | None, begun: float) -> None:
        another = None not in (epoch, self.epoch) and epoch != self.epoch
        was_away = self.state in {"down", "probing"}
        if another and not was_away:
            self._new_generation(sure=True)
        if another or was_away:
            self._suspects.returned(begun, another=another)
        if self._suspect_at is not None and self._suspect_at <= begun:
            self._suspect_at = None
        changed = epoch is not None and epoch != self.epoch
        if changed:
            self.epoch = epoch
        if was_away:
            self._turn("ready", "")
        elif changed:
            self._on_change(self)

    def _new_generation(self, *, sure: bool) -> None:
        self.generation += 1
        self._watchdog.forget()
        self._model = None
        self._metrics.epochs.add()
        self.upstream.drop_idle()
        self._probed.drop_idle()
        for encoder in self.group:
            encoder.lose()
        now = asyncio.get_running_loop().time()
        self._suspects.died((f.fingerprint for f in self.forwards), now, sure=sure)

    def _turn(self, state: Literal["ready", "down", "stalled"], reason: str) -> None:
        self.state = state
        self.reason = reason
        self.since = time.time()
        self._on_change(self)

    # probes

    async def watch(self) -> None:
        """Probe it for ever, and look whether it moves."""
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            await self.check()
            self._look_for_stall()
            await asyncio.sleep(max(0.05, begun + self._settings.pd_probe_interval - loop.time()))

    def _begin_check(self, moment: float | None = None) -> asyncio.Task[None]:
        task = self._check = asyncio.get_running_loop().create_task(self._look(moment))
        task.add_done_callback(self._checked)
        return task

    def _checked(self, task: asyncio.Task[None]) -> None:
        self._check = None
        if not task.cancelled():
            task.result()

    async def check(self, moment: float | None = None) -> None:
        """Probe it now, together with whoever else wants to know.

        With `moment`, an answer on a connection that is older than this loop time is enough: it comes
        from the same process.
        """
        await asyncio.shield(self._check or self._begin_check(moment))

    async def _look(self, moment: float | None) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        limit = self._settings.pd_probe_timeout
        try:
            response, _ = await self._get(b"/health", limit)
        except UpstreamError as error:
            if error.cause == "exhausted":
                self._unasked = True
                return
            if error.cause == "timeout" and self.heard_since(begun):
                return
            self.went_down(f"/health: {error}", sure=error.cause != "timeout")
            return
        if response.status >= 500:
            self.went_down(f"/health answers {response.status}")
            return
        self.alive()
        self._unasked = False
        if moment is not None and response.reused and response.born <= moment and self._suspect_at is None:
            return
        epoch = None
        try:
            answer, body = await self._get(b"/metrics", limit)
            if answer.status == 200:
                self._vitals = read_vitals(body)
                epoch = self._vitals.epoch
        except UpstreamError as error:
            if error.cause == "exhausted":
                self._unasked = True
                return
            # Its health was just seen. A death between the two is seen by the next probe.
            if error.cause in {"refused", "reset"}:
                self.went_down(f"/metrics: {error}")
                return
        self._came_up(epoch, begun)

    async def _get(self, path: bytes, limit: float) -> tuple[Response, bytes]:
        try:
            return await self._get_once(path, limit, fresh=False)
        except UpstreamError as error:
            if not error.stale:
                raise
        return await self._get_once(path, limit, fresh=True)

    async def _get_once(self, path: bytes, limit: float, *, fresh: bool) -> tuple[Response, bytes]:
        response = await self._probed.request(b"GET", path, self._key, timeout=limit, fresh=fresh)
        try:
            return response, await response.read_all(8 * 1024 * 1024) or b""
        finally:
            response.close()

    async def lives_on(self) -> bool:
        """Whether it answers and is still the same: what it failed was one request."""
        generation = self.generation
        await self.check()
        return self.state == "ready" and generation == self.generation

    async def confirm(self, moment: float) -> None:
        """Make sure that it was heard after `moment`, or raise the 503 that says it was not."""
        for _ in range(2):
            self.refuse_if_away()
            if self._suspect_at is None and self.state == "ready" and self.heard_since(moment):
                return
            await self.check(moment)
        self.refuse_if_away()
        if self._unasked:
            raise busy("No descriptor is left to ask the PD with", retry_after=2.0)

    # does it move

    def _look_for_stall(self) -> None:
        if self.state == "down":
            return
        waiting = [f for f in self.forwards if f.response is None or not f.response.complete]
        last = max((f.sent_at if f.response is None else f.response.active for f in waiting), default=None)
        now = asyncio.get_running_loop().time()
        stalled = self._watchdog.look(now, last, self._vitals)
        if stalled and self.state != "stalled":
            self._metrics.stalls.add()
            silent = f"no byte for {now - last:.0f} s" if last is not None else "no byte"
            self._turn("stalled", f"{silent}, and a one-token request is late")
        elif not stalled and self.state == "stalled":
            self._turn("ready", "")

    async def one_token(self) -> bool:
        """Send a one-token text request; True when the PD ran it."""
        limit = self._settings.first_byte_timeout
        try:
            if self._model is None:
                answer, body = await self._get(b"/v1/models", self._settings.pd_probe_timeout)
                self._model = (first_model(body) if answer.status == 200 else None) or self.asked_for
            if self._model is None:
                return False
            headers = self._key + b"content-type: application/json\r\n"
            response = await self.upstream.request(
                b"POST",
                b"/v1/chat/completions",
                headers,
                [canary_body(self._model)],
                timeout=limit,
                fresh=True,
            )
            try:
                await response.read_all(1024 * 1024)
            finally:
                response.close()
        except UpstreamError:
            return False
        self.alive()
        return response.status == 200

    async def flush(self) -> bool:
        """Make the PD take a step, so that nothing pushed before it is left in its queue."""
        begun = asyncio.get_running_loop().time()
        if not await self.one_token():
            return False
        self.group.flushed_at = max(self.group.flushed_at, begun)
        return True

    # a request

    async def send(
        self, forward: Forward, path: bytes, headers: bytes, body: Sequence[Buffer], timeout: float
    ) -> Response:
        """Send a request and return its answer, status read; raises the `Failure` to answer otherwise.

        It is sent a second time only when the first cannot have been read: no connection was made, or a
        kept one died before any byte, and the PD is still the same.
        """
        generation = self.generation
        fresh = False
        while True:
            try:
                response = await self.upstream.request(
                    b"POST", path, headers, body, timeout=timeout, fresh=fresh
                )
            except UpstreamError as error:
                if error.cause == "exhausted":
                    raise busy(f"The PD was not asked: {error}", retry_after=2.0) from None
                unsent = error.cause in {"refused", "connect"}
                if not unsent and not error.stale:
                    if error.cause != "timeout":
                        self.broke(forward.fingerprint)
                        raise upstream(f"The PD gave no answer: {error}") from None
                    raise upstream(f"The PD gave no answer: {error}", status=504) from None
                if unsent:
                    self._suspect_at = asyncio.get_running_loop().time()
                await self.check()
                self.refuse_if_away()
                if fresh or generation != self.generation:
                    raise upstream(f"The PD gave no answer: {error}", status=503) from None
                fresh = True
                self._metrics.retries.add("pd", "stale" if error.stale else error.cause)
                continue
            forward.response = response
            self.alive()
            return response

    def close(self) -> None:
        """Close every connection."""
        if self._check is not None:
            self._check.cancel()
        self._watchdog.forget()
        self.upstream.close()
        self._probed.close()

"""Asks each encoder in the background whether it answers, and looks for those that take items and hang."""

import asyncio
from collections.abc import Iterable
from uuid import uuid4

from eccon_proxy.encoders import Encoder
from eccon_proxy.metrics import Metrics
from eccon_proxy.settings import Settings
from eccon_proxy.upstream import UpstreamError
from eccon_proxy.vitals import encoded, first_model, trial_body

__all__ = ["Prober"]

NOT_ASKED = "no descriptor was left to ask with"
"""Says nothing about the encoder."""
HANG_FACTOR = 8.0
"""An encoder hangs when nothing came from it for so many times what the slowest of its peers take."""
HANG_FLOOR = 3.0
HANG_CEILING = 20.0
LATE = 1.5
"""vLLM answers `/health` in milliseconds, however busy its engine is: one that is so late may be stopped."""
LOOK_EVERY = 0.5


class Prober:
    """One task for each member."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[Encoder, asyncio.TimerHandle] = {}
        self._acquittals: dict[str, asyncio.Task[None]] = {}

    def watch(self, encoder: Encoder) -> None:
        """Probe a member until `forget`."""
        self._tasks[encoder.id] = asyncio.get_running_loop().create_task(self._probe(encoder))

    def forget(self, encoder: Encoder) -> None:
        """Probe it no longer."""
        for tasks in (self._tasks, self._acquittals):
            task = tasks.pop(encoder.id, None)
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """End all."""
        tasks = (*self._tasks.values(), *self._acquittals.values())
        self._tasks.clear()
        self._acquittals.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self, encoder: Encoder) -> None:
        loop = asyncio.get_running_loop()
        misses = 0
        while True:
            begun = loop.time()
            self._timers[encoder] = loop.call_later(LATE, self._late, encoder, begun)
            try:
                reason = await self._ask(encoder)
            finally:
                self._timers.pop(encoder).cancel()
            if reason is NOT_ASKED:
                pass
            elif reason is None or encoder.last_success > begun:  # too busy for us, but not for its work
                misses = 0
                took = encoder.open and not encoder.suspect
                encoder.suspect = False
                encoder.answered()
                if encoder.open != took:
                    encoder.group.changed()
            else:
                misses += 1
                if misses >= self._settings.probe_failures or encoder.answers is None:
                    encoder.silent(reason)
                    _evict(encoder, reason)
                    encoder.group.changed()
            self._look_for_hang(encoder)
            # What a trial pushes must find a PD that takes it.
            if encoder.group.pd_ready and encoder.trial_due(loop.time()):
                await self._trial(encoder)
            await asyncio.sleep(max(0.05, begun + self._settings.probe_interval - loop.time()))

    async def _ask(self, encoder: Encoder) -> str | None:
        """Why it does not answer; None when it does."""
        error: UpstreamError | None = None
        for fresh in (False, True):
            try:
                response = await encoder.probed.request(
                    b"GET", b"/health", timeout=self._settings.probe_timeout, fresh=fresh
                )
            except UpstreamError as e:
                error = e
                if e.cause == "exhausted":
                    return NOT_ASKED
                if not e.stale:
                    break
                continue
            try:
                await response.read_all(64 * 1024)
            except UpstreamError as e:
                return f"/health: {e}"
            finally:
                response.close()
            return None if response.status < 500 else f"/health answers {response.status}"
        return f"/health: {error}"

    def acquit(self, encoder: Encoder) -> None:
        """Ask an encoder at once whether it can encode: others fail as well."""
        if encoder.trial or encoder.leaving or not encoder.answers or not encoder.group.pd_ready:
            return
        encoder.trial = encoder.accused = True
        task = asyncio.get_running_loop().create_task(self._acquit(encoder))
        self._acquittals[encoder.id] = task

    async def _acquit(self, encoder: Encoder) -> None:
        try:
            await self._trial(encoder)
        finally:
            encoder.trial = encoder.accused = False
            self._acquittals.pop(encoder.id, None)
            encoder.group.changed()

    async def _trial(self, encoder: Encoder) -> None:
        """Let an ejected encoder encode a small image of ours: its return costs no client anything."""
        loop = asyncio.get_running_loop()
        limit = min(self._settings.encode_timeout, HANG_CEILING)
        begun = loop.time()
        encoder.trial = True
        try:
            status, body = await self._encode_ours(encoder, limit)
        except UpstreamError as error:
            if error.cause == "exhausted":
                return
            if error.cause == "timeout":  # it may still encode and push it
                self._orphan(encoder)
            encoder.failed(f"a trial failed: {error}", loop.time(), since=begun)
            return
        finally:
            encoder.trial = False
        if 400 <= status < 500:
            # It cannot be tried by us: a key we lack, say. A client's item tries it.
            if encoder.ejected_until is not None:
                encoder.half_open()
        elif status == 200 and encoded(body):
            self._orphan(encoder)
            encoder.returned()
        else:
            encoder.failed(f"a trial was answered with {status}", loop.time(), since=begun)
            return
        encoder.group.changed()

    def _orphan(self, encoder: Encoder) -> None:
        """The image of a trial is pushed like any other, and no request will ask for it."""
        encoder.pushed_for_nobody(asyncio.get_running_loop().time())
        self._metrics.orphans.add()

    async def _encode_ours(self, encoder: Encoder, limit: float) -> tuple[int, bytes | None]:
        key = self._settings.upstream_api_key.encode()
        headers = b"authorization: Bearer %b\r\n" % key if key else b""
        status, body = await _whole(encoder, b"GET", b"/v1/models", headers, [], limit)
        model = first_model(body or b"") if status == 200 else None
        if model is None or "image_url" not in self._settings.encode_kinds:
            return 400, None
        headers += b"content-type: application/json\r\n"
        request = trial_body(model, f"ec-trial-{uuid4().hex}")
        return await _whole(encoder, b"POST", b"/v1/chat/completions", headers, [request], limit)

    def _late(self, encoder: Encoder, begun: float) -> None:
        """Its `/health` is late and nothing came from it meanwhile: others get the items, new ones and those
        that take longer than theirs do. It is not down for that, and keeps what it has staged."""
        loop = asyncio.get_running_loop()
        self._timers[encoder] = loop.call_later(LOOK_EVERY, self._late, encoder, begun)
        others = [e for e in encoder.group if e is not encoder and e.open and not e.suspect]
        was, encoder.suspect = (
            encoder.suspect,
            bool(others) and encoder.open and encoder.last_success <= begun,
        )
        if was and not encoder.suspect:
            encoder.group.changed()
        usual = _slow(*(e.seconds for e in others))
        if not encoder.suspect or usual is None:
            return
        for visit, at in tuple(encoder.inflight.items()):
            if loop.time() - at > usual:
                visit.evict("its encoder is late with everything")

    def _look_for_hang(self, encoder: Encoder) -> None:
        """Eject an encoder whose probes pass but whose items do not come back, and send them elsewhere."""
        if not encoder.inflight or encoder.leaving:
            return
        now = asyncio.get_running_loop().time()
        others = [e for e in encoder.group if e is not encoder and e.open]
        slowest = _slow(encoder.seconds, *(e.seconds for e in others))
        limit = min(HANG_CEILING, self._settings.encode_timeout)
        if not encoder.on_trial:  # one on trial is to show within this that it works
            if not others or slowest is None:
                return
            limit = min(max(HANG_FACTOR * slowest, HANG_FLOOR), limit)
        begun = max(encoder.last_success, min(encoder.inflight.values()), encoder.acquitted_at)
        silent = now - begun
        if silent < limit:
            return
        if silent < 2 * limit and all(visit.fetched for visit in encoder.inflight):
            # It may only wait for a slow host. If it encodes an image of ours meanwhile, it does not hang.
            self.acquit(encoder)
            return
        reason = f"holds {len(encoder.inflight)} items and has encoded none for {silent:.0f} s"
        if encoder.eject(reason, now, since=begun):
            self._metrics.ejections.add(encoder.id)
        _evict(encoder, reason)
        encoder.group.changed()


async def _whole(
    encoder: Encoder, method: bytes, path: bytes, headers: bytes, body: list[bytes], limit: float
) -> tuple[int, bytes | None]:
    response = await encoder.probed.request(
        method, path, headers, body, timeout=limit, total=limit, fresh=True
    )
    try:
        return response.status, await response.read_all(1024 * 1024)
    finally:
        response.close()


def _evict(encoder: Encoder, reason: str) -> None:
    for visit in tuple(encoder.inflight):
        visit.evict(reason)


def _slow(*samples: Iterable[float]) -> float | None:
    """The 95th percentile of all samples together, None without any."""
    times = sorted(t for sample in samples for t in sample)
    return times[len(times) * 95 // 100] if times else None

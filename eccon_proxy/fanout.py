"""A plan's items → encoders: each staged by one of them, or the request ends with the reason.

An item is tried at one encoder after another until one has encoded it. What a client did wrong (4xx)
ends the request at once; so does the loss of the PD.
"""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from eccon_proxy.encoders import Encoder, Staged
from eccon_proxy.errors import Failure, bad_request, busy, down, upstream
from eccon_proxy.identity import Identity
from eccon_proxy.metrics import Metrics
from eccon_proxy.pd import PD
from eccon_proxy.plan import Item, Plan, encoder_body
from eccon_proxy.requestid import derived
from eccon_proxy.settings import Settings
from eccon_proxy.trace import Recorder, SpanRecord
from eccon_proxy.upstream import UpstreamError
from eccon_proxy.vitals import encoded
from eccon_proxy.weights import Weights

__all__ = ["Fanout", "Services"]

CHAT = b"/v1/chat/completions"
ANSWER_LIMIT = 1024 * 1024
"""An encoder's answer is a few hundred bytes; more than this is not one."""
ROUNDS = 3
"""How often items that went void while siblings were encoded are encoded again."""


class _Error(msgspec.Struct):
    error: dict[str, object] | str


_error = msgspec.json.Decoder(_Error)


class Services(msgspec.Struct, frozen=True):
    """What a fan-out needs of the rest."""

    settings: Settings
    metrics: Metrics
    identity: Identity
    weights: Weights


class _EncodeError(Exception):
    """One attempt failed; `cause` is the reason as metrics name it."""

    def __init__(self, cause: str, message: str, *, blame: bool, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.blame = blame
        self.retry_after = retry_after


class Attempt:
    """One visit to an encoder; may be taken back, so that its item goes elsewhere."""

    __slots__ = ("evicted", "started", "task")

    def __init__(self, started: float) -> None:
        self.started = started
        self.evicted = ""
        self.task: asyncio.Task[object] | None = asyncio.current_task()

    def evict(self, reason: str) -> None:
        """Give up this visit and try another encoder."""
        if not self.evicted and self.task is not None:
            self.evicted = reason
            self.task.cancel()


class Fanout:
    """The encodes of one request."""

    def __init__(self, services: Services, plan: Plan, pd: PD, recorder: Recorder, headers: bytes) -> None:
        self._settings = services.settings
        self._metrics = services.metrics
        self._identity = services.identity
        self._plan = plan
        self._pd = pd
        self._recorder = recorder
        self._headers = headers + b"content-type: application/json\r\n"
        self._weights = [services.weights.of(plan, item) for item in plan.items]
        self._staged: list[Staged | None] = [None] * len(plan.items)
        self._tries = [0] * len(plan.items)
        self._generation = pd.generation
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped: Failure | None = None
        self.first_at = 0.0
        """Loop time at which the first item was encoded."""
        self.last_at = 0.0

    async def run(self) -> Sequence[Staged]:
        """Encode all items; what is returned is usable at this very moment.

        Raises the `Failure` that ends the request; nothing is left staged then but orphans.
        """
        self._pd.on_down.add(self.stop)
        try:
            for _ in range(ROUNDS):
                missing = self._missing()
                if missing:
                    await self._round(missing)
                    self._gate_wait()
                await self._pd.confirm(self.first_at)
                if not self._missing():
                    return [s for s in self._staged if s is not None]
            raise busy("Items went stale faster than they were encoded", retry_after=5.0)
        except BaseException:
            self.abandon()
            raise
        finally:
            self._pd.on_down.discard(self.stop)

    def stop(self, failure: Failure) -> None:
        """End it from outside."""
        self._stopped = failure
        for task in self._tasks:
            task.cancel()

    def abandon(self) -> None:
        """Nobody will use what is staged."""
        for s in self._staged:
            if s is not None:
                self._pd.orphaned(s)
        self._staged = [None] * len(self._staged)

    def _missing(self) -> list[int]:
        """Positions of items that are not, or no longer, staged for the PD's present life."""
        oldest = asyncio.get_running_loop().time() - self._settings.staged_age
        if self._generation != self._pd.generation:
            self._generation = self._pd.generation
            self.abandon()
        for i, s in enumerate(self._staged):
            if s is not None and not s.usable(oldest):
                self._pd.orphaned(s)
                self._staged[i] = None
        return [i for i, s in enumerate(self._staged) if s is None]

    async def _round(self, missing: list[int]) -> None:
        loop = asyncio.get_running_loop()
        self.first_at = 0.0
        # Tasks begin in this order: the largest item chooses first.
        missing.sort(key=lambda i: -self._weights[i])
        self._tasks = [loop.create_task(self._encode(i)) for i in missing]
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            pending = [t for t in self._tasks if not t.done()]
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending)
        if self._stopped is not None:
            raise self._stopped
        failures = [e for t in self._tasks if not t.cancelled() and (e := t.exception()) is not None]
        self._tasks = []
        if failures:
            raise failures[0]
        self.first_at = min(s.at for s in self._staged if s is not None)

    def _gate_wait(self) -> None:
        times = [s.at for s in self._staged if s is not None]
        self.last_at = max(times)
        self._metrics.gate_wait.observe(self.last_at - min(times))

    async def _encode(self, position: int) -> None:
        """Encode one item somewhere."""
        item = self._plan.items[position]
        group = self._pd.group
        tried: set[str] = set()
        last: _EncodeError | None = None
        fresh = False
        stay: Encoder | None = None
        while len(tried) < self._settings.encode_attempts or stay is not None:
            weight = self._weights[position]
            encoder = stay if stay is not None else await self._slot(item, tried, weight, last)
            if stay is not None:
                group.take(encoder, weight)
            stay = None
            tried.add(encoder.id)
            attempt = Attempt(asyncio.get_running_loop().time())
            encoder.inflight[attempt] = attempt.started
            try:
                self._staged[position] = await self._hedged(
                    item, position, encoder, attempt, tried, fresh=fresh
                )
                return
            except _EncodeError as error:
                last = error
                if error.cause == "stale" and not fresh:
                    fresh, stay = True, encoder
                else:
                    fresh = False
                self._metrics.retries.add("encoder", error.cause)
            except asyncio.CancelledError:
                if not attempt.evicted or self._stopped is not None:
                    raise
                fresh = False
                last = _EncodeError("evicted", attempt.evicted, blame=False)
                self._metrics.retries.add("encoder", "evicted")
            finally:
                encoder.inflight.pop(attempt, None)
                group.release(encoder, weight)
                encoder.touched()
        raise self._gave_up(item, last)

    async def _slot(self, item: Item, tried: set[str], weight: float, last: _EncodeError | None) -> Encoder:
        group = self._pd.group
        if not item.payload:
            return self._who_saw(item, tried, weight)
        key = b""
        if self._settings.policy == "affinity":
            key = self._identity.make(self._plan, item) or b""
        try:
            encoder = await group.acquire(tried, weight, self._settings.encode_wait, key)
        except asyncio.TimeoutError:
            raise busy(f"{item.where}: no encoder was free in time", retry_after=5.0) from None
        if encoder is None:
            if last is None:
                raise down("No encoder is ready", code="encoders_down")
            raise self._gave_up(item, last)
        return encoder

    def _who_saw(self, item: Item, tried: set[str], weight: float) -> Encoder:
        """The one encoder that can know an item without data."""
        wanted = self._identity.who_saw(item.client_uuid or "")
        for encoder in self._pd.group:
            if encoder.id == wanted and encoder.open and encoder.id not in tried:
                self._pd.group.take(encoder, weight)
                return encoder
        raise bad_request(
            f"{item.where}: no encoder knows this uuid; send the data with it", param=f"{item.where}.uuid"
        )

    async def _hedged(
        self,
        item: Item,
        position: int,
        encoder: Encoder,
        attempt: Attempt,
        tried: set[str],
        *,
        fresh: bool,
    ) -> Staged:
        """One visit, and a second at an idle encoder when the first takes unusually long; the first wins."""
        factor = self._settings.hedge
        usual = encoder.p95() if factor and item.payload else None
        if usual is None:
            return await self._visit(item, position, encoder, attempt, fresh=fresh)
        loop = asyncio.get_running_loop()
        visits = {loop.create_task(self._visit(item, position, encoder, attempt, fresh=fresh))}
        other: Encoder | None = None
        try:
            done, _ = await asyncio.wait(visits, timeout=usual * factor)
            if not done:
                other = self._pd.group.idle({*tried, encoder.id})
                if other is not None:
                    self._pd.group.take(other, 1.0)
                    self._metrics.retries.add("encoder", "hedge")
                    other.inflight[second := Attempt(loop.time())] = loop.time()
                    visits.add(loop.create_task(self._visit(item, position, other, second, fresh=False)))
            return await self._first_of(visits)
        finally:
            for task in visits:
                task.cancel()
            await asyncio.gather(*visits, return_exceptions=True)
            if other is not None:
                other.inflight.pop(second, None)
                self._pd.group.release(other, 1.0)

    async def _first_of(self, visits: "set[asyncio.Task[Staged]]") -> Staged:
        """The first success; what else succeeds is an orphan. Raises when all failed."""
        pending = set(visits)
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            good = [t.result() for t in done if not t.cancelled() and t.exception() is None]
            if good:
                for staged in good[1:]:
                    self._pd.orphaned(staged)
                for task in pending:
                    task.add_done_callback(self._late)
                return good[0]
            bad = [e for t in done if not t.cancelled() and (e := t.exception()) is not None]
            if not pending or any(isinstance(e, Failure) for e in bad):
                raise bad[0]

    def _late(self, task: "asyncio.Task[Staged]") -> None:
        if not task.cancelled() and task.exception() is None:
            self._pd.orphaned(task.result())

    def _gave_up(self, item: Item, last: _EncodeError | None) -> Failure:
        message = f"{item.where}: not encoded; the last encoder: {last}"
        if last is not None and last.cause == "busy":
            return busy(message, retry_after=last.retry_after or 1.0)
        if last is not None and last.cause == "timeout":
            return upstream(message, status=504, code="encode_timeout")
        return upstream(message, code="encode_failed")

    async def _visit(
        self, item: Item, position: int, encoder: Encoder, attempt: Attempt, *, fresh: bool
    ) -> Staged:
        self._tries[position] += 1
        tries = self._tries[position]
        uuid = self._identity.make(self._plan, item)
        key = uuid if uuid is not None else self._identity.label(item)
        span = self._recorder.span(
            "encode",
            item=item.index,
            attempt=tries,
            encoder=encoder.id,
            uuid=(uuid.decode() if uuid is not None else item.client_uuid or ""),
        )
        outcome = "cancelled"
        started = time.perf_counter()
        encoder.touched()
        try:
            life = encoder.life
            await self._ask(item, encoder, uuid, tries, span, fresh=fresh)
            if life != encoder.life:
                raise _EncodeError("lost", f"{encoder.id} went down meanwhile", blame=False)
            outcome = "ok"
        except _EncodeError as error:
            outcome = error.cause
            now = asyncio.get_running_loop().time()
            if error.blame and encoder.failed(str(error), now):
                self._metrics.ejections.add(encoder.id)
            span.close("timeout" if error.cause == "timeout" else "error", str(error))
            raise
        except Failure as failure:
            outcome = "client_error"
            span.close("error", failure.message)
            raise
        finally:
            self._metrics.encodes.add(encoder.id, outcome)
            span.close("cancelled", attempt.evicted)
        seconds = time.perf_counter() - started
        now = asyncio.get_running_loop().time()
        self._metrics.encode_seconds.observe(seconds, encoder.id)
        encoder.succeeded(seconds, now)
        if uuid is None and item.client_uuid is not None:
            self._identity.saw(item.client_uuid, encoder.id)
        staged = Staged(encoder, key, now)
        encoder.staged[key] = staged
        return staged

    async def _ask(
        self, item: Item, encoder: Encoder, uuid: bytes | None, tries: int, span: SpanRecord, *, fresh: bool
    ) -> None:
        limit = self._settings.encode_timeout
        request_id = derived(self._recorder.id, f"{item.index}.{tries}")
        headers = b"%bx-request-id: %b\r\n" % (self._headers, request_id)
        try:
            response = await encoder.upstream.request(
                b"POST", CHAT, headers, encoder_body(self._plan, item, uuid),
                timeout=limit, total=limit, fresh=fresh,
            )  # fmt: skip
            try:
                body = await response.read_all(ANSWER_LIMIT)
            finally:
                response.close()
        except UpstreamError as error:
            cause = "stale" if error.stale and not fresh else error.cause
            raise _EncodeError(cause, str(error), blame=cause != "stale") from None
        status = response.status
        if status == 200:
            if not encoded(body):
                message = f"{encoder.id} answers 200 without choices"
                raise _EncodeError("protocol", message, blame=True)
            span.close()
            return
        if status in {429, 503}:
            wait = response.header(b"retry-after") or b""
            seconds = float(wait) if wait.isdigit() else None
            message = f"{encoder.id} is busy ({status})"
            raise _EncodeError("busy", message, blame=False, retry_after=seconds)
        if 400 <= status < 500 and status != 408:
            raise _refused(status, body or b"", response.header(b"content-type"), item)
        raise _EncodeError("status", f"{encoder.id} answers {status}: {_message(body or b'')}", blame=True)


def _message(body: bytes) -> str:
    try:
        error = _error.decode(body).error
    except msgspec.DecodeError:
        return body[:200].decode("utf-8", "replace")
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def _refused(status: int, body: bytes, content_type: bytes | None, item: Item) -> Failure:
    """The encoder's refusal of a part, with its own error object."""
    message = f"{item.where}: {_message(body)}"
    try:
        ours = not isinstance(_error.decode(body).error, dict)
    except msgspec.DecodeError:
        ours = True
    if ours:  # no error object: vLLM's own 401 has a string, a stray web server a page
        return Failure(status, message, kind="invalid_request_error", param=item.where)
    headers = ((b"content-type", content_type or b"application/json"),)
    return Failure(status, message, kind="invalid_request_error", headers=headers, body=body)

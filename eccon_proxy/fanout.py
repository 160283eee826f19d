"""A plan's items → encoders: each staged by one of them, or the request ends with the reason.

An item is tried at one encoder after another until one has encoded it. What a client did wrong (4xx)
ends the request at once; so does the loss of the PD.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from eccon_proxy.charges import Charges
from eccon_proxy.encoders import Encoder, Staged
from eccon_proxy.errors import Failure, bad_request, busy, down, upstream
from eccon_proxy.guard import DELIVERED
from eccon_proxy.identity import Identity
from eccon_proxy.metrics import Metrics
from eccon_proxy.pd import PD
from eccon_proxy.plan import Item, Plan, encoder_body, is_fetched
from eccon_proxy.requestid import derived
from eccon_proxy.settings import Settings
from eccon_proxy.trace import Recorder
from eccon_proxy.visit import Attempt, EncodeError, ask
from eccon_proxy.weights import Weights

__all__ = ["Fanout", "Services"]

ROUNDS = 3
"""How often one item is encoded, when what was encoded goes void before the request is at the PD."""
LOOK_EVERY = 0.25
"""Seconds between two looks at whether what is staged has gone void, while siblings are encoded."""
HEDGE_LOOK = 0.05
"""Seconds between two looks for an idle encoder, for an item that is late."""


class Services(msgspec.Struct, frozen=True):
    """What a fan-out needs of the rest."""

    settings: Settings
    metrics: Metrics
    identity: Identity
    weights: Weights
    acquit: Callable[[Encoder], None]
    """Asks an encoder that failed, as others did, whether it can encode at all."""


class Fanout:
    """The encodes of one request."""

    def __init__(
        self,
        services: Services,
        plan: Plan,
        pd: PD,
        recorder: Recorder,
        headers: bytes,
        *,
        renew: bool = False,
    ) -> None:
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
        self._charges = Charges(len(plan.items), services.metrics, services.acquit)
        self._renew = renew
        """Whether this is a second time: whatever the identity was, it is a new one now."""
        if renew:
            for span in recorder.spans:
                for i, item in enumerate(plan.items):
                    if span.kind == "encode" and span.item == item.index:
                        self._tries[i] = max(self._tries[i], span.attempt)
        self._rounds = [0] * len(plan.items)
        self._generation = pd.generation
        self._tasks: dict[asyncio.Task[None], int] = {}
        """Encodes under way, and the position of their item."""
        self._stopped: Failure | None = None
        self._over = False
        """Whether whoever is cancelled now shall end, and not try another encoder."""
        self.first_at = 0.0
        """Loop time at which the first item was encoded."""
        self.last_at = 0.0
        self.guarded = services.settings.guard == "on"
        """Whether any encoder showed that the connector is guarded."""

    async def run(self) -> Sequence[Staged]:
        """Encode all items; what is returned is usable at this very moment.

        Raises the `Failure` that ends the request; nothing is left staged then but orphans.
        """
        self._pd.on_down.add(self.stop)
        try:
            while True:
                await self._encode_missing()
                await self._pd.confirm(self.first_at)
                if not self._missing():
                    return [s for s in self._staged if s is not None]
        except BaseException:
            self.abandon()
            raise
        finally:
            self._pd.on_down.discard(self.stop)
            self._stopped = None  # see the end of `_encode_missing`

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

    async def _encode_missing(self) -> None:
        """Encode all that is missing side by side, and what goes void meanwhile at once again."""
        failures: list[BaseException]
        task: asyncio.Task[None] | None
        try:
            self._refuse_if_stopped()
            while self._begin(self._missing()):
                # With a sibling to wait for, what is staged may go void meanwhile.
                done, _ = await asyncio.wait(
                    self._tasks,
                    timeout=LOOK_EVERY if len(self._staged) > 1 else None,
                    return_when=asyncio.FIRST_EXCEPTION,
                )
                for task in done:
                    del self._tasks[task]
                failures = [*filter(None, map(_failure, done))]
                self._refuse_if_stopped()
                if failures:
                    raise failures[0]
        finally:
            self._over = True
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            for task in self._tasks:
                _failure(task)  # one is told; asyncio would log the others
            self._tasks.clear()
            self._over = False
            # What is raised must not be held by what its traceback holds: the body would outlive the request.
            done, failures, task = set(), [], None
        times = [s.at for s in self._staged if s is not None]
        self.first_at, self.last_at = min(times), max(times)
        self._metrics.gate_wait.observe(self.last_at - self.first_at)

    def _refuse_if_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def _begin(self, missing: list[int]) -> bool:
        """Start what is missing and not under way; whether anything is under way now."""
        if self._tasks:
            running = set(self._tasks.values())
            missing = [i for i in missing if i not in running]
        # Tasks begin in this order: the largest item chooses first.
        missing.sort(key=lambda i: -self._weights[i])
        for i in missing:
            self._rounds[i] += 1
            if self._rounds[i] > ROUNDS:
                raise busy("Items went stale faster than they were encoded", retry_after=5.0)
            self._tasks[asyncio.get_running_loop().create_task(self._encode(i))] = i
        return bool(self._tasks)

    async def _encode(self, position: int) -> None:
        """Encode one item somewhere."""
        item, weight = self._plan.items[position], self._weights[position]
        group = self._pd.group
        tried: set[str] = set()
        last: EncodeError | None = None
        fresh = False
        encoder: Encoder | None = None
        while len(tried) < self._settings.encode_attempts or fresh:
            if encoder is not None and fresh:
                group.take(encoder, weight)
            else:
                encoder = await self._slot(item, tried, weight, last)
            tried.add(encoder.id)
            try:
                self._staged[position] = await self._hedged(position, encoder, tried, fresh=fresh)
                return
            except EncodeError as error:
                last = error.with_traceback(None)  # it would hold this frame, which holds it
                # A kept connection that died before any byte: once more there, on a new one.
                fresh = error.cause == "stale" and not fresh
                self._metrics.retries.add("encoder", error.cause)
            finally:
                group.release(encoder, weight)
                encoder.touched()
        raise self._gave_up(item, last)

    async def _slot(self, item: Item, tried: set[str], weight: float, last: EncodeError | None) -> Encoder:
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

    async def _hedged(self, position: int, encoder: Encoder, tried: set[str], *, fresh: bool) -> Staged:
        """One visit, and a second at an idle encoder when the first takes unusually long; the first wins."""
        factor = self._settings.hedge
        usual = encoder.p95() if factor and self._plan.items[position].payload else None
        if usual is None:
            return await self._visit(position, encoder, fresh=fresh)
        loop = asyncio.get_running_loop()
        group, weight = self._pd.group, self._weights[position]
        first = loop.create_task(self._visit(position, encoder, fresh=fresh))
        visits = [first]
        other: Encoder | None = None
        won: Staged | None = None
        try:
            await asyncio.wait(visits, timeout=usual * factor)
            while not first.done() and (other := group.idle(tried)) is None:
                await asyncio.wait(visits, timeout=HEDGE_LOOK)
            if other is not None:
                group.take(other, weight)
                tried.add(other.id)
                self._metrics.retries.add("encoder", "hedge")
                visits.append(loop.create_task(self._visit(position, other, fresh=True)))
            won = await _first_of(visits)
            return won
        finally:
            for task in visits:
                task.cancel()
            await asyncio.gather(*visits, return_exceptions=True)
            for task in visits:
                if not task.cancelled() and task.exception() is None and task.result() is not won:
                    self._pd.orphaned(task.result())
            if other is not None:
                group.release(other, weight)
                other.touched()

    def _gave_up(self, item: Item, last: EncodeError | None) -> Failure:
        message = f"{item.where}: not encoded; the last encoder: {last}"
        if last is not None and last.cause in {"busy", "exhausted"}:
            return busy(message, retry_after=last.retry_after or 1.0)
        if last is not None and last.cause == "timeout":
            return upstream(message, status=504, code="encode_timeout")
        return upstream(message, code="encode_failed")

    async def _visit(self, position: int, encoder: Encoder, *, fresh: bool) -> Staged:
        """Have one item encoded at one encoder, and enter it in the books."""
        loop = asyncio.get_running_loop()
        item = self._plan.items[position]
        self._tries[position] += 1
        tries = self._tries[position]
        uuid = self._identity.make(self._plan, item, renew=self._renew)
        span = self._recorder.span(
            "encode",
            item=item.index,
            attempt=tries,
            encoder=encoder.id,
            uuid=(uuid.decode() if uuid is not None else item.client_uuid or ""),
        )
        outcome = "cancelled"
        started = time.perf_counter()
        attempt = Attempt(loop.time(), fetched=is_fetched(self._plan, item))
        encoder.inflight[attempt] = attempt.started
        encoder.touched()
        try:
            if encoder.leaving:  # since the slot was taken
                raise EncodeError("evicted", f"{encoder.id} is leaving", blame=False)
            life = encoder.life
            request_id = derived(self._recorder.id, f"{item.index}.{tries}")
            headers = b"%bx-request-id: %b\r\n" % (self._headers, request_id)
            body = encoder_body(self._plan, item, uuid)
            word = await ask(encoder, headers, body, item, limit=self._settings.encode_timeout, fresh=fresh)
            self._require_delivery(encoder, word)
            if life != encoder.life:
                raise EncodeError("lost", f"{encoder.id} went down meanwhile", blame=False)
            outcome = "ok"
            span.close()
        except EncodeError as error:
            outcome = error.cause
            if error.cause == "status":
                self._charges.bring(position, encoder, str(error), attempt.started)
            elif error.blame and encoder.failed(str(error), loop.time(), since=attempt.started):
                self._metrics.ejections.add(encoder.id)
            span.close("timeout" if error.cause == "timeout" else "error", str(error))
            raise
        except Failure as failure:
            outcome = "client_error"
            span.close("error", failure.message)
            raise
        except asyncio.CancelledError:
            if not attempt.evicted or self._over or self._stopped is not None:
                raise
            outcome = "evicted"
            raise EncodeError("evicted", attempt.evicted, blame=False) from None
        finally:
            encoder.inflight.pop(attempt, None)
            attempt.over()
            self._metrics.encodes.add(encoder.id, outcome)
            span.close("cancelled", attempt.evicted)
        seconds = time.perf_counter() - started
        now = loop.time()
        self._metrics.encode_seconds.observe(seconds, encoder.id)
        encoder.succeeded(seconds, now)
        self._charges.encoded(position)
        if uuid is None and item.client_uuid is not None:
            self._identity.saw(item.client_uuid, encoder.id)
        return encoder.hold(uuid if uuid is not None else self._identity.label(item), now)

    def _require_delivery(self, encoder: Encoder, word: str | None) -> None:
        """A guarded encoder's 200 counts only with the PD's acknowledgement in it."""
        mode = self._settings.guard
        if mode == "off" or (word is None and mode == "auto"):
            return
        self.guarded = True
        if word is None:
            message = f"{encoder.id} does not say whether the PD got the item: it is not guarded"
            raise EncodeError("undelivered", message, blame=False)
        if word != DELIVERED:
            message = f"{encoder.id} encoded the item, but the PD did not get it ({word})"
            raise EncodeError("undelivered", message, blame=False)


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


async def _first_of(visits: "Sequence[asyncio.Task[Staged]]") -> Staged:
    """The first success. Raises when all failed, or when one was the client's own fault."""
    pending = set(visits)
    error: BaseException | None = None
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        ended = [t for t in done if not t.cancelled()]
        for task in ended:
            if task.exception() is None:
                return task.result()
        for task in ended:
            error = task.exception()
            if isinstance(error, Failure):
                break
        else:
            continue
        break
    try:
        raise error or EncodeError("lost", "the visit was given up", blame=False)
    finally:
        error, done, ended = None, set(), []  # see `_encode_missing`

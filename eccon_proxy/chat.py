"""`/v1/chat/completions`: plan → room → encode → gate → PD → client."""

import asyncio
import time
from collections.abc import Awaitable, Sequence

from eccon_proxy.errors import Failure, bad_request, busy, down, upstream
from eccon_proxy.exchange import Exchange
from eccon_proxy.fanout import Fanout
from eccon_proxy.guard import LostError
from eccon_proxy.pd import PD, Forward
from eccon_proxy.plan import Buffer, Plan, fingerprint, parse, pd_body
from eccon_proxy.requestid import derived, usable
from eccon_proxy.settings import RBLN_CONNECTOR

__all__ = ["chat", "enter", "forward", "limit_time", "refuse_when_full"]


async def chat(ex: Exchange) -> None:
    """Serve one chat request."""
    core = ex.core
    headers = ex.upstream_headers()
    ex.check_type()
    refuse_when_full(ex)
    body = await ex.read_body()
    timer = limit_time(ex)
    queued = False
    try:
        plan = _plan(ex, body)
        trace = ex.trace
        trace.model, trace.items, trace.stream = plan.model, len(plan.places), plan.stream
        await enter(ex)
        queued = True
        if core.inliner is not None and plan.items:
            inlined = await core.inliner.inline(plan)
            if inlined is not None:
                plan = _plan(ex, inlined)
        pd = await core.pick_pd(media=bool(plan.items))
        mark = fingerprint(body)
        pd.refuse_poison(mark)
        if plan.items:
            await _with_media(ex, plan, pd, mark, headers)
        else:
            await forward(ex, Forward(pd, mark, (), 0), headers, [plan.body])
    finally:
        if queued:
            core.room.give()
        if timer is not None:
            timer.cancel()


def _plan(ex: Exchange, body: bytes | bytearray) -> Plan:
    core, settings = ex.core, ex.core.settings
    return parse(
        body,
        kinds=core.encode_kinds,
        most=settings.pd_items,
        keep_uuid=core.services.identity.keeps,
        allow_bare=settings.identity == "off" and settings.connector != RBLN_CONNECTOR,
    )


async def _with_media(ex: Exchange, plan: Plan, pd: PD, mark: int, headers: bytes) -> None:
    """Encode and ask; once more with new identities when a guarded PD lost an item of it."""
    keeps = ex.core.services.identity.keeps
    try:
        await _encode_and_ask(ex, plan, pd, mark, headers, first=True, again=not keeps)
        return
    except LostError as error:
        ex.start_over(str(error))
        if keeps:
            raise upstream(str(error), code="item_lost") from None
    ex.core.metrics.retries.add("pd", "lost")
    pd.refuse_if_away()
    try:
        await _encode_and_ask(ex, plan, pd, mark, headers, first=False, again=False)
    except LostError as error:
        raise upstream(f"{error}, twice", code="item_lost") from None


async def _encode_and_ask(
    ex: Exchange, plan: Plan, pd: PD, mark: int, headers: bytes, *, first: bool, again: bool
) -> None:
    core = ex.core
    if not pd.group.possible():
        raise down("No encoder is ready", code="encoders_down")
    places = len(plan.items)
    capacity = pd.group.capacity or places  # none open: one that is due for a trial may take them
    if places > capacity:
        raise busy(f"{places} items; the encoders that are ready hold {capacity}", retry_after=5.0)
    pd.room.size = min(core.settings.pd_items, capacity)
    if not pd.room.take_now(places):
        await _wait(
            ex, pd.room.take(places, core.settings.queue_timeout), "The PD has no room for more items"
        )
    try:
        fanout = Fanout(core.services, plan, pd, ex.trace, headers, renew=not first)
        staged = await fanout.run()
    except BaseException:
        pd.room.give(places)
        raise
    # Nothing may be awaited from here until the request is at the PD: what was just found usable is.
    request = Forward(pd, mark, staged, places)
    uuids = None if core.services.identity.keeps else [s.uuid for s in staged]
    ex.trace.gate()
    core.traces.changed(ex.trace)
    await forward(
        ex,
        request,
        headers,
        pd_body(plan, uuids),
        encoded_at=fanout.last_at,
        guarded=fanout.guarded,
        again=again,
        # The first one may be in the engine's books yet.
        request_id=b"" if first else derived(ex.trace.id, "again"),
    )


async def forward(
    ex: Exchange,
    request: Forward,
    headers: bytes,
    body: Sequence[Buffer],
    *,
    encoded_at: float | None = None,
    guarded: bool = False,
    again: bool = False,
    request_id: bytes = b"",
) -> None:
    """Send a request to the PD and its answer to the client. `guarded` and `again`: see `Exchange.relay`."""
    pd = request.pd
    pd.forwards.add(request)
    ex.trace.span("pd")
    lines = b"%bcontent-type: %b\r\nx-request-id: %b\r\n" % (
        headers, ex.content_type or b"application/json", request_id or ex.trace.id.encode(),
    )  # fmt: skip
    try:
        response = await pd.send(request, ex.path, lines, body, ex.core.settings.first_byte_timeout)
    except BaseException:
        request.end()
        raise
    await ex.relay(response, request, guarded=guarded, again=again)
    if encoded_at is not None and ex.trace.first_byte is not None:
        loop_to_clock = time.perf_counter() - asyncio.get_running_loop().time()
        ex.core.metrics.encode_to_first_byte.observe(ex.trace.first_byte - loop_to_clock - encoded_at)


def limit_time(ex: Exchange) -> asyncio.TimerHandle | None:
    """Arm the request's deadline, if there is one."""
    limit = ex.core.settings.request_timeout
    for name, value in ex.scope["headers"]:
        if name == b"x-request-timeout":
            try:
                wanted = float(value)
            except ValueError:
                wanted = 0.0
            if not 0 < wanted < 1e6 or not usable(value):
                raise bad_request("x-request-timeout: not a number of seconds", param="x-request-timeout")
            limit = min(limit, wanted) if limit else wanted
    if not limit:
        return None
    failure = upstream(f"Not answered within {limit:g} s", status=504, code="request_timeout")
    return asyncio.get_running_loop().call_later(limit, ex.stop, failure)


async def enter(ex: Exchange) -> None:
    """Take a place among the requests under way, which is to be given back; wait in the queue for it."""
    room = ex.core.room
    if not room.take_now():
        refuse_when_full(ex)  # others may have come while its body did
        await _wait(ex, room.take(1, ex.core.settings.queue_timeout), "The proxy is full")


def refuse_when_full(ex: Exchange) -> None:
    """Raise the 503 when the queue is full as well: better before a body is read than after."""
    room = ex.core.room
    if room.taken >= room.size and room.waiting >= ex.core.settings.queue:
        ex.core.metrics.refused.add("full")
        raise busy("The proxy is full")


async def _wait(ex: Exchange, taking: Awaitable[None], message: str) -> None:
    """Wait in a queue."""
    span = ex.trace.span("queue")
    begun = time.perf_counter()
    try:
        await taking
    except asyncio.TimeoutError:
        ex.core.metrics.refused.add("queue_timeout")
        raise busy(message, retry_after=5.0) from None
    except Failure:
        ex.core.metrics.refused.add("pd_down")
        raise
    finally:
        span.close()
        ex.core.metrics.queue_wait.observe(time.perf_counter() - begun)

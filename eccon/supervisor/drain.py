"""Before a process is stopped on purpose: what it holds for others goes on or goes elsewhere.

An encoder that is stopped with items staged takes the PD along: the PD connects to it at its next step and
dies when it cannot. So: no new items, wait for those under way (a stuck encoder's are cancelled and go
elsewhere at once), then a *flush*: a one-token text request, whose step empties the PD's queue of announced
items. Seen with vLLM 0.30: after push and flush an encoder may be killed, without the flush the PD exits.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from eccon.model import Role, State
from eccon.supervisor.lives import Life
from eccon.supervisor.proxylink import ProxyLinkError

if TYPE_CHECKING:
    from eccon.supervisor.owner import Owner

__all__ = ["drain"]

LOOK_EVERY_S = 0.2


class Woken(Protocol):
    """Waits until the owner is woken, or for some seconds."""

    def __call__(self, timeout: float | None = None) -> Awaitable[None]: ...


async def drain(owner: "Owner", life: Life, still: Callable[[], bool], woken: Woken) -> bool:
    """Prepares the stop of `owner`'s process. True when it may be stopped now.

    False when it is wanted again meanwhile (`still` says no: it serves on) or has died.
    """
    if owner.spec.role is Role.ENCODER:
        return await _drain_encoder(owner, life, still, woken)
    if owner.spec.role is Role.PD:
        return await _pause_for_pd(owner, life, still, woken)
    return True


async def _drain_encoder(owner: "Owner", life: Life, still: Callable[[], bool], woken: Woken) -> bool:
    context, name = owner.context, owner.name
    link = context.proxy
    stuck = owner.state is State.STALLED
    owner.set_state(State.DRAINING, "takes no new items")
    begun = time.monotonic()
    limit = context.topology.supervisor.drain_timeout_s
    asked, drained = "", False
    while not life.died:
        if not still():
            await _serve_on(owner, life)
            return False
        if owner.force or not context.pd_lives():
            break
        info = link.encoders.get(name)
        if not link.connected or info is None:
            break
        if info.state == "drained":
            drained = True
            break
        late = time.monotonic() - begun > limit
        mode = "now" if stuck or late else "gently"
        if info.state != "draining" or asked != mode:
            try:
                await link.drain(name, now=mode == "now")
            except ProxyLinkError as e:
                context.board.log(name, f"the proxy refused to drain it: {e}", "warning")
                break
            asked = mode
        told = f"{info.inflight} in flight, {info.staged} staged; {time.monotonic() - begun:.0f} s"
        if time.monotonic() - begun > 2 * limit:
            told += "; with force it is stopped now, and the PD may die"
        owner.set_state(State.DRAINING, told)
        await woken(LOOK_EVERY_S)
    # The proxy's drain ends with a flush; without the proxy it is on us.
    ours = not drained and not life.died and not owner.force and context.pd_lives()
    if ours and not await context.flush_pd():
        context.board.log(name, "the PD could not be flushed before the stop", "warning")
    return not life.died


async def _serve_on(owner: "Owner", life: Life) -> None:
    try:
        if not owner.aside:
            await owner.context.proxy.resume(owner.name)
    except ProxyLinkError as e:
        owner.context.board.log(owner.name, f"the proxy did not resume it: {e}", "warning")
    await owner.became_ready(life)


async def _pause_for_pd(owner: "Owner", life: Life, still: Callable[[], bool], woken: Woken) -> bool:
    """Media requests are held off; those at the PD may end, within the time limit."""
    context = owner.context
    link = context.proxy
    stalled = owner.state is State.STALLED
    owner.set_state(State.DRAINING, "no more images are sent to it")
    await context.pause_media("the PD is being restarted", False)
    begun = time.monotonic()
    while not life.died and link.connected and not owner.force:
        if not still():
            await owner.became_ready(life)
            return False
        inflight = sum(pd.inflight for pd in link.pds.values())
        if inflight == 0 or time.monotonic() - begun > context.topology.supervisor.drain_timeout_s:
            break
        owner.set_state(State.DRAINING, f"{inflight} requests to end; {time.monotonic() - begun:.0f} s")
        await woken(LOOK_EVERY_S)
    if link.connected and not stalled and not life.died:
        # One that stalls may have been brought to it by a request; else those at it are bystanders.
        try:
            await link.expect_pd_restart(owner.spec.url, context.topology.supervisor.stop_grace_s + 10.0)
        except ProxyLinkError as e:
            context.board.log(owner.name, f"the proxy was not told of the restart: {e}", "warning")
    await asyncio.sleep(0)
    return not life.died

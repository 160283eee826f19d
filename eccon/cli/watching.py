"""Waiting for the cluster, or one process of it, to get where a command sent it."""

import asyncio
from collections.abc import Callable

from eccon.cli.common import FAILED, follow, narrate
from eccon.cli.progress import Progress
from eccon.client import Client, NotRunning
from eccon.model import ClusterState, Process, Role, State

__all__ = ["ENDED", "serves", "settle", "watch"]

ENDED = (State.FAILED, State.BLOCKED)
"""Those that nothing more happens in by itself, or not soon."""


def serves(p: Process) -> bool:
    """Ready; an encoder also in the proxy's eyes, which is what sends it items."""
    in_rotation = p.role is not Role.ENCODER or (p.encoder is not None and p.encoder.state == "ready")
    return p.state is State.READY and in_rotation


async def watch(
    client: Client,
    there: Callable[[ClusterState], bool],
    timeout: float,
    complaint: str,
    only: str | None = None,
    *,
    without_some: bool = False,
) -> int:
    """Shows processes until the state is `there` (0), or a wanted one has failed (1, with last lines).

    Args:
        only: the one that matters; else all.
        without_some: some encoders may fail, as long as there is one that has not.

    Raises:
        TimeoutError: neither within `timeout` seconds.
    """

    async def look(progress: Progress) -> list[Process]:
        async for state in follow(client):
            looked_at = [p for p in state.processes if only in {None, p.name}]
            progress.show(looked_at)
            lost = [p for p in looked_at if p.wanted and p.state in ENDED]
            bearable = without_some and _can_serve(state)
            if there(state) or (lost and not bearable):
                return [] if bearable else lost
        msg = "the daemon ended"
        raise NotRunning(msg)

    try:
        with Progress() as progress:
            lost = await asyncio.wait_for(look(progress), timeout)
    except asyncio.TimeoutError as e:
        msg = f"{complaint} after {timeout:g} s"
        raise TimeoutError(msg) from e
    for p in lost:
        # One that is blocked was not started: its last lines are of an earlier life.
        for text in p.last_lines if p.state is State.FAILED else ():
            narrate(f"  {p.name} | {text}")
    return FAILED if lost else 0


def _can_serve(state: ClusterState) -> bool:
    """Whether PD, proxy and some encoder are wanted and have not failed."""
    well = {r: [p.wanted and p.state not in ENDED for p in state.processes if p.role is r] for r in Role}
    return all(well[Role.PD]) and all(well[Role.PROXY]) and any(well[Role.ENCODER])


async def settle(
    client: Client, name: str, wanted: State | None, timeout: float, after: Process | None = None
) -> int:
    """Shows `name` until it is in the state `wanted` (None: gone), with another pid than `after` had."""

    async def look(progress: Progress) -> int:
        async for state in follow(client):
            p = state.process(name)
            if p is None:
                if wanted is None:
                    return 0
                continue
            progress.show([p])
            reached = serves(p) if wanted is State.READY else p.state is wanted
            if reached and (after is None or p.pid != after.pid):
                return 0
            if p.state in ENDED and wanted is not State.STOPPED:
                return FAILED
        msg = "the daemon ended"
        raise NotRunning(msg)

    try:
        with Progress() as progress:
            return await asyncio.wait_for(look(progress), timeout)
    except asyncio.TimeoutError as e:
        msg = f"{name}: not {wanted.value if wanted else 'gone'} after {timeout:g} s"
        raise TimeoutError(msg) from e

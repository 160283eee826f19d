"""Commands on encoders as the proxy sees them: who gets items, and all of them renewed one by one."""

import asyncio

import click

from eccon.cli.common import command, config_option, control_socket, narrate
from eccon.cli.watching import settle, watch
from eccon.client import Client
from eccon.model import ClusterState, Role, State

__all__ = ["drain", "resume", "roll", "roll_all"]

timeout_option = click.option(
    "--timeout", type=float, default=1800.0, show_default=True, help="Seconds to wait for the end state."
)


@click.command()
@click.argument("name")
@config_option
@timeout_option
@click.option("--now", is_flag=True, help="Items in flight go elsewhere at once.")
@command
async def drain(name: str, file: str | None, timeout: float, now: bool) -> int:
    """Give an encoder no more items, until `resume`; wait until it holds none. It runs on."""
    async with Client(control_socket(file)) as client:
        await client.drain(name, now=now)

        def drained(state: ClusterState) -> bool:
            p = state.process(name)
            return p is None or p.encoder is None or p.encoder.state == "drained"

        return await watch(client, drained, timeout, f"{name}: not drained", only=name)


@click.command()
@click.argument("name")
@config_option
@timeout_option
@command
async def resume(name: str, file: str | None, timeout: float) -> int:
    """Give an encoder items again."""
    async with Client(control_socket(file)) as client:
        await client.resume(name)
        return await settle(client, name, State.READY, timeout)


@click.command()
@config_option
@timeout_option
@command
async def roll(file: str | None, timeout: float) -> int:
    """Restart all encoders, each when the one before serves again."""
    async with Client(control_socket(file)) as client:
        return await roll_all(client, timeout)


async def roll_all(client: Client, timeout: float) -> int:
    """The rolling restart, watched until its end; the daemon goes on with it by itself.

    Raises:
        TimeoutError: not done within `timeout` seconds.
    """
    state = await client.state()
    await client.roll()
    try:
        for p in (p for p in state.processes if p.role is Role.ENCODER and p.wanted and not p.external):
            if code := await settle(client, p.name, State.READY, timeout, after=p):
                return code
    except asyncio.CancelledError:
        narrate("the rolling restart goes on; `eccon status` tells how far it is")
        raise
    return 0

"""Commands on single processes: restart, start, stop, encoders more or less, logs."""

import click

from eccon.cli.common import command, config_option, control_socket, long_config_option
from eccon.cli.rotation import roll_all
from eccon.cli.watching import serves, settle, watch
from eccon.client import Client
from eccon.model import ClusterState, Role, State

__all__ = ["add", "logs", "remove", "restart", "scale", "start", "stop"]


def _wait_option(f: click.decorators.FC) -> click.decorators.FC:
    return click.option(
        "--timeout", type=float, default=1800.0, show_default=True, help="Seconds to wait for the end state."
    )(f)


@click.command()
@click.argument("name", required=False)
@config_option
@_wait_option
@click.option("--force", is_flag=True, help="Do not wait for what it staged; the PD may die.")
@click.option("--rolling", is_flag=True, help="All encoders, each when the one before is ready again.")
@command
async def restart(name: str | None, file: str | None, timeout: float, force: bool, rolling: bool) -> int:
    """Restart one process; an encoder is drained first."""
    if (name is None) is not rolling:
        msg = "give the NAME of one process, or --rolling"
        raise click.UsageError(msg)
    async with Client(control_socket(file)) as client:
        if name is None:
            return await roll_all(client, timeout)
        before = (await client.state()).process(name)
        await client.restart(name, force=force)
        return await settle(client, name, State.READY, timeout, after=before)


@click.command()
@click.argument("count", type=click.IntRange(1, 1024))
@config_option
@_wait_option
@command
async def scale(count: int, file: str | None, timeout: float) -> int:
    """Add or remove encoders until there are COUNT."""
    async with Client(control_socket(file)) as client:
        await client.scale(count)

        def there(state: ClusterState) -> bool:
            encoders = [p for p in state.processes if p.role is Role.ENCODER]
            return len(encoders) == count and all(serves(p) for p in encoders if p.wanted)

        return await watch(client, there, timeout, f"not {count} encoders")


@click.command()
@click.argument("name")
@config_option
@_wait_option
@command
async def start(name: str, file: str | None, timeout: float) -> int:
    """Start one stopped process."""
    async with Client(control_socket(file)) as client:
        await client.start(name)
        return await settle(client, name, State.READY, timeout)


@click.command()
@click.argument("name")
@config_option
@_wait_option
@click.option("--force", is_flag=True, help="Do not wait for what it staged; the PD may die.")
@command
async def stop(name: str, file: str | None, timeout: float, force: bool) -> int:
    """Stop one process; an encoder is drained first."""
    async with Client(control_socket(file)) as client:
        await client.stop(name, force=force)
        return await settle(client, name, State.STOPPED, timeout)


@click.command()
@config_option
@_wait_option
@command
async def add(file: str | None, timeout: float) -> int:
    """Add an encoder on the next free device and port."""
    async with Client(control_socket(file)) as client:
        name = await client.add()
        click.echo(name)
        return await settle(client, name, State.READY, timeout)


@click.command()
@click.argument("name")
@config_option
@_wait_option
@click.option("--force", is_flag=True, help="Do not wait for what it staged; the PD may die.")
@command
async def remove(name: str, file: str | None, timeout: float, force: bool) -> int:
    """Drain an encoder, stop it and take it out of the cluster."""
    async with Client(control_socket(file)) as client:
        await client.remove(name, force=force)
        return await settle(client, name, None, timeout)


@click.command()
@click.argument("name")
@long_config_option
@click.option("-n", "--lines", type=click.IntRange(min=0), default=200, show_default=True)
@click.option("-f", "--follow", "follow_", is_flag=True, help="Go on as the log grows.")
@click.option("-g", "--grep", default="", metavar="TEXT", help="Only lines that contain it, in any case.")
@command
async def logs(name: str, file: str | None, lines: int, follow_: bool, grep: str) -> int:
    """Print a process's log (`daemon`: the daemon's own)."""
    async with Client(control_socket(file)) as client:
        async for line in client.logs(name, lines, follow=follow_, grep=grep):
            click.echo(line)
    return 0

"""`eccon demo`: the whole path in a temporary directory, on free ports, gone afterwards."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import click

from eccon import prompt, scaffold
from eccon.cli.cluster import stop_all, wait_until_ready
from eccon.cli.common import FAILED, INTERRUPTED, USAGE, command, narrate
from eccon.cli.lab import refuse_unready
from eccon.cli.requests import TEXT, ask
from eccon.client import Client, NotRunning
from eccon.console import refuse_reason
from eccon.lab import about, cluster
from eccon.lab.place import Place, default
from eccon.supervisor import start_daemon

__all__ = ["demo"]

ENCODERS = 4
LINGER_S = 120.0
READY_S = 120.0
LAB_READY_S = 600.0
GONE_S = 60.0


@click.command()
@click.option("--headless", is_flag=True, help="No console: progress on stderr until interrupted.")
@click.option(
    "--once", is_flag=True, help="With --headless: send the eight-image prompt, print its way, stop."
)
@click.option("--encoders", type=click.IntRange(1, 64), help="4 if not given; 2 with --lab.")
@click.option("--lab", "on_lab", is_flag=True, help="On real vLLM instead: what `eccon lab setup` made.")
@click.option("--theme", metavar="NAME", help="The console's theme.")
def demo(headless: bool, once: bool, encoders: int | None, on_lab: bool, theme: str | None) -> None:
    """Run one PD, four encoders and the proxy on the stand-in for vLLM, and open the console.

    It ends with `q`, or two minutes after its last console vanished; nothing of it is left.
    """
    place = Place(default())
    if on_lab and refuse_unready(place):
        sys.exit(USAGE)
    if not headless and (reason := refuse_reason()):
        narrate(f"{reason}; going on as `eccon demo --headless --once`")
        headless = once = True
    directory = Path(tempfile.mkdtemp(prefix="eccon-demo-"))
    # The cluster's state is in there too: the daemon inherits this and removes the directory at its end.
    os.environ["ECCON_STATE_DIR"] = str(directory / "state")
    encoders = encoders or (cluster.ENCODERS if on_lab else ENCODERS)
    try:
        ports = scaffold.free_ports(encoders)
        if on_lab:
            narrate(about.text(place.version()))
            path = directory / "eccon.toml"
            path.write_text(
                cluster.config(place, name="demo", encoders=encoders, ports=ports), encoding="utf-8"
            )
        else:
            path = scaffold.demo(directory, encoders=encoders, ports=ports)
        socket = _daemon(path)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if headless:
        _headless(path, socket, once, LAB_READY_S if on_lab else READY_S)
        return
    from eccon.cli.console import open_console  # noqa: PLC0415  only here is drawn

    asyncio.run(_up(socket))
    code = open_console(socket, on_quit_ask=False, theme=theme)
    asyncio.run(_end(path, socket))
    sys.exit(code)


def _daemon(path: Path) -> Path:
    """Starts it; its control socket."""
    return start_daemon(path, linger_s=LINGER_S, ephemeral=path.parent).control_socket


async def _up(socket: Path) -> None:
    async with Client(socket) as client:
        await client.up()


async def _end(path: Path, socket: Path) -> None:
    """Stops everything and returns when the daemon is gone. One that was killed has left its children."""
    try:
        await _stop(socket)
    except NotRunning:
        if await asyncio.to_thread(path.exists):
            await _stop(_daemon(path))


async def _stop(socket: Path) -> None:
    async with Client(socket) as client:
        await asyncio.wait_for(stop_all(client), GONE_S)


@command
async def _headless(path: Path, socket: Path, once: bool, ready_s: float) -> int:
    main_task = asyncio.current_task()
    assert main_task is not None  # noqa: S101  we run in one
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(sig, main_task.cancel)
    try:
        async with Client(socket) as client:
            await client.up()
            attendance = asyncio.create_task(_attend(client))
            try:
                if code := await wait_until_ready(client, ready_s):
                    return code
                if once:
                    return await _eight_images(client)
                narrate(f"attach a console: eccon attach --socket {socket}    end: Ctrl-C")
                await attendance
            finally:
                attendance.cancel()
            return 0
    except asyncio.CancelledError:
        return INTERRUPTED
    finally:
        await _end(path, socket)


async def _attend(client: Client) -> None:
    """Counts as a console until cancelled: the daemon does not linger out in a long start."""
    with contextlib.suppress(NotRunning):
        async for _ in client.changes(console=True):
            pass


async def _eight_images(client: Client) -> int:
    state = await client.state()
    body = prompt.build(state.cluster.model, TEXT, [str(p) for p in prompt.samples()], stream=True)
    trace, error = await ask(client, body)
    if error or trace is None:
        narrate(f"eccon: {error or 'the request left no trace'}")
        return FAILED
    for line in prompt.image_lines(trace):
        click.echo(line)
    return 0

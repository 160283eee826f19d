"""Commands that start, watch, change and stop a cluster."""

import asyncio
import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

import click
import msgspec

from eccon import config
from eccon.cli.common import (
    FAILED,
    INTERRUPTED,
    USAGE,
    command,
    config_option,
    control_socket,
    file_or_parents,
    follow,
    narrate,
)
from eccon.cli.progress import Progress
from eccon.client import Client, ControlError, NotRunning
from eccon.model import ClusterState, Process, Quantiles, Role, State
from eccon.supervisor import start_daemon

__all__ = [
    "add",
    "down",
    "logs",
    "reload",
    "remove",
    "restart",
    "start",
    "status",
    "stop",
    "up",
    "wait_until_ready",
]

ENDED = (State.FAILED, State.BLOCKED)


@click.command()
@config_option
@click.option("-d", "--detach", is_flag=True, help="Return at once.")
@click.option("--timeout", type=float, default=1800.0, show_default=True, help="Seconds to wait until ready.")
@command
async def up(file: str | None, detach: bool, timeout: float) -> int:
    """Start the daemon and the cluster; show progress until it is ready. Ctrl-C leaves it running."""
    return await bring_up(file, detach=detach, timeout=timeout)


async def bring_up(file: str | None, *, detach: bool, timeout: float = 0) -> int:
    """`eccon up`; with `detach` it returns as soon as the start is under way. The exit code."""
    topology = config.load(config.find(file))
    launcher = topology.launcher
    if launcher.kind == "vllm" and shutil.which(launcher.vllm) is None:
        msg = f"{topology.path}: launcher.vllm = {launcher.vllm!r}: no such command; give the path of vllm"
        raise config.ConfigError(msg)
    socket = control_socket(str(topology.path))
    was_running = await _is_running(socket)
    paths = await asyncio.to_thread(start_daemon, topology.path)
    async with Client(paths.control_socket) as client:
        try:
            await client.up()
        except ControlError as e:
            if not was_running:
                await stop_all(client)
            for line in str(e).splitlines():
                narrate(f"eccon: {line}")
            return USAGE if e.status == 409 else FAILED
        if detach:
            narrate(f"{topology.name} is starting; `eccon status` tells how far it is")
            return 0
        try:
            return await wait_until_ready(client, timeout)
        except asyncio.CancelledError:
            narrate(f"\n{topology.name} goes on starting; `eccon down` stops it")
            return INTERRUPTED


async def _is_running(socket: Path) -> bool:
    try:
        async with Client(socket) as client:
            await client.state()
    except NotRunning:
        return False
    return True


async def wait_until_ready(client: Client, timeout: float) -> int:
    """Shows every step until all wanted processes are ready (0) or one has failed (1).

    Raises:
        TimeoutError: neither within `timeout` seconds.
    """

    async def watch(progress: Progress) -> ClusterState:
        async for state in follow(client):
            progress.show(state.processes)
            wanted = [p for p in state.processes if p.wanted]
            if any(p.state in ENDED for p in wanted) or (wanted and all(map(_serves, wanted))):
                return state
        msg = "the daemon ended"
        raise NotRunning(msg)

    try:
        with Progress() as progress:
            state = await asyncio.wait_for(watch(progress), timeout)
    except asyncio.TimeoutError as e:
        msg = f"not ready after {timeout:g} s; it goes on starting"
        raise TimeoutError(msg) from e
    lost = [p for p in state.processes if p.wanted and p.state in ENDED]
    for p in lost:
        for text in p.last_lines:
            narrate(f"  {p.name} | {text}")
    if lost:
        return FAILED
    narrate(f"ready: {state.cluster.public_url}")
    return 0


def _serves(p: Process) -> bool:
    """Ready; an encoder also in the proxy's eyes, which is what sends it items."""
    in_rotation = p.role is not Role.ENCODER or (p.encoder is not None and p.encoder.state == "ready")
    return p.state is State.READY and in_rotation


@click.command()
@config_option
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds to wait for the end.")
@command
async def down(file: str | None, timeout: float) -> int:
    """Stop every process of the cluster, and the daemon."""
    async with Client(control_socket(file)) as client:
        await asyncio.wait_for(stop_all(client), timeout)
    narrate("stopped")
    return 0


async def stop_all(client: Client) -> None:
    """Shuts the cluster down, narrates it, and returns when the daemon is gone."""
    pid = (await client.state()).cluster.daemon_pid
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        loop.add_reader(fd, gone.set)
        await client.shutdown()
        with contextlib.suppress(NotRunning):
            await _show_states(client)
        await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def _show_states(client: Client) -> None:
    with Progress() as progress:
        async for state in follow(client):
            progress.show(state.processes)


@click.command()
@config_option
@click.option("--json", "as_json", is_flag=True, help="The whole state as JSON.")
@command
async def status(file: str | None, as_json: bool) -> int:
    """What runs, and how it is."""
    async with Client(control_socket(file)) as client:
        state = await client.state()
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        return 0
    click.echo(_table(state))
    return 0


def _table(state: ClusterState) -> str:
    c = state.cluster
    head = f"{c.name}  {c.public_url}  {c.health}" + (f": {c.reason}" if c.reason else "")
    rows = [
        ("NAME", "STATE", "DEVICE", "PORT", "PID", "UP", "RESTARTS", "IN/ST", "ITEMS", "XFER P50/P99 MS", "")
    ]
    for p in state.processes:
        e = p.encoder
        rows.append(
            (
                p.name,
                p.state.value,
                p.device or "-",
                str(p.port),
                str(p.pid or "-"),
                _age(p),
                str(p.restarts),
                f"{e.inflight}/{e.staged}" if e else "-",
                str(e.items) if e else "-",
                _ms(p.transfer.total) if p.transfer else "-",
                p.reason,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    ]
    alarms = [f"! {a.subject}: {a.text}" for a in state.alarms]
    return "\n".join([head, *alarms, *lines])


def _age(p: Process) -> str:
    if p.started_at is None or p.pid is None:
        return "-"
    s = int(time.time() - p.started_at)
    return f"{s // 3600}h{s // 60 % 60:02}m" if s >= 3600 else f"{s // 60}m{s % 60:02}s"


def _ms(q: Quantiles) -> str:
    return f"{q.p50:.1f}/{q.p99:.1f}"


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
        state = await client.state()
        names = [name] if name else [p.name for p in state.processes if p.role is Role.ENCODER and p.wanted]
        for each in names:
            before = state.process(each)
            await client.restart(each, force=force)
            if code := await _settle(client, each, State.READY, timeout, after=before):
                return code
    return 0


@click.command()
@config_option
@command
async def reload(file: str | None) -> int:
    """Read eccon.toml again and apply what changed; a file with a fault changes nothing."""
    config.load(config.find(file))
    async with Client(control_socket(file)) as client:
        await client.reload()
    return 0


@click.command()
@click.argument("name")
@config_option
@_wait_option
@command
async def start(name: str, file: str | None, timeout: float) -> int:
    """Start one stopped process."""
    async with Client(control_socket(file)) as client:
        await client.start(name)
        return await _settle(client, name, State.READY, timeout)


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
        return await _settle(client, name, State.STOPPED, timeout)


@click.command()
@config_option
@_wait_option
@command
async def add(file: str | None, timeout: float) -> int:
    """Add an encoder on the next free device and port."""
    async with Client(control_socket(file)) as client:
        name = await client.add()
        click.echo(name)
        return await _settle(client, name, State.READY, timeout)


@click.command()
@click.argument("name")
@config_option
@_wait_option
@command
async def remove(name: str, file: str | None, timeout: float) -> int:
    """Drain an encoder, stop it and take it out of the cluster."""
    async with Client(control_socket(file)) as client:
        await client.remove(name)
        return await _settle(client, name, None, timeout)


async def _settle(
    client: Client, name: str, wanted: State | None, timeout: float, after: Process | None = None
) -> int:
    """Shows `name` until it is in the state `wanted` (None: gone), with another pid than `after` had."""

    async def watch(progress: Progress) -> int:
        async for state in follow(client):
            p = state.process(name)
            if p is None:
                if wanted is None:
                    return 0
                continue
            progress.show([p])
            reached = _serves(p) if wanted is State.READY else p.state is wanted
            if reached and (after is None or p.pid != after.pid):
                return 0
            if p.state in ENDED and wanted is not State.STOPPED:
                return FAILED
        msg = "the daemon ended"
        raise NotRunning(msg)

    try:
        with Progress() as progress:
            return await asyncio.wait_for(watch(progress), timeout)
    except asyncio.TimeoutError as e:
        msg = f"{name}: not {wanted.value if wanted else 'gone'} after {timeout:g} s"
        raise TimeoutError(msg) from e


@click.command()
@click.argument("name")
@click.option("--file", "file", metavar="FILE", callback=file_or_parents, help="eccon.toml, as elsewhere -f.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=200, show_default=True)
@click.option("-f", "--follow", "follow_", is_flag=True, help="Go on as the log grows.")
@command
async def logs(name: str, file: str | None, lines: int, follow_: bool) -> int:
    """Print a process's log (`daemon`: the daemon's own)."""
    async with Client(control_socket(file)) as client:
        async for line in client.logs(name, lines=lines, follow=follow_):
            click.echo(line)
    return 0

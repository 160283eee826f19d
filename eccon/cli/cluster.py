"""Commands that start, watch, change and stop a cluster."""

import asyncio
import contextlib
import os
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
    follow,
    narrate,
    plain,
)
from eccon.cli.progress import Progress
from eccon.cli.watching import ENDED, serves, watch
from eccon.client import Client, ControlError, NotRunning
from eccon.launch import versions
from eccon.model import ClusterState, Process, Quantiles
from eccon.supervisor import start_daemon

__all__ = ["bring_up", "down", "reload", "status", "stop_all", "up", "wait_until_ready"]

CLEAR = "\x1b[H\x1b[2J"
REDRAW_S = 1.0
"""On a terminal, at least this long between two tables of which only the figures differ."""


@click.command()
@config_option
@click.option("-d", "--detach", is_flag=True, help="Return at once.")
@click.option("--timeout", type=float, default=1800.0, show_default=True, help="Seconds to wait until ready.")
@click.option(
    "--partial",
    is_flag=True,
    help="Where a port or device is taken, that process is blocked; the rest starts.",
)
@command
async def up(file: str | None, detach: bool, timeout: float, partial: bool) -> int:
    """Start the daemon and the cluster; show progress until it is ready. Ctrl-C leaves it running."""
    return await bring_up(file, detach=detach, timeout=timeout, partial=partial)


async def bring_up(file: str | None, *, detach: bool, timeout: float = 0, partial: bool = False) -> int:
    """`eccon up`; with `detach` it returns as soon as the start is under way. The exit code."""
    topology = config.load(config.find(file))
    for name, vllm in versions.launchers(topology).items():
        if versions.command_path(vllm, topology.directory) is None:
            key = "launcher.vllm" if vllm == topology.launcher.vllm else f"vllm of {name}"
            msg = f"{topology.path}: {key} = {vllm!r}: no such command; give the path of vllm"
            raise config.ConfigError(msg)
    socket = control_socket(str(topology.path))
    was_running = await _is_running(socket)
    paths = await asyncio.to_thread(start_daemon, topology.path)
    async with Client(paths.control_socket) as client:
        try:
            await client.up(partial=partial)
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
            return await wait_until_ready(client, timeout, partial=partial)
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


async def wait_until_ready(client: Client, timeout: float, *, partial: bool = False) -> int:
    """Shows every step until all wanted processes are ready (0) or one has failed (1).

    Args: partial: encoders that are blocked or have failed may be missing, as long as there is another.

    Raises:
        TimeoutError: neither within `timeout` seconds.
    """

    def all_serve(state: ClusterState) -> bool:
        wanted = [p for p in state.processes if p.wanted and not (partial and p.state in ENDED)]
        return bool(wanted) and all(map(serves, wanted))

    code = await watch(
        client, all_serve, timeout, "not ready, though it goes on starting,", without_some=partial
    )
    if code == 0:
        state = await client.state()
        for p in state.processes:
            if p.wanted and p.state in ENDED:
                narrate(f"without {p.name}: {p.reason}")
        narrate(f"ready: {state.cluster.public_url}")
    return code


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
@click.option("--json", "as_json", is_flag=True, help="The whole state as JSON; with --watch one line each.")
@click.option("-w", "--watch", "watch_", is_flag=True, help="Again whenever something changes, until Ctrl-C.")
@command
async def status(file: str | None, as_json: bool, watch_: bool) -> int:
    """What runs, and how it is."""
    async with Client(control_socket(file)) as client:
        if watch_:
            await _watch_status(client, as_json=as_json)
            msg = "the daemon ended"
            raise NotRunning(msg)
        state = await client.state()
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        return 0
    click.echo(_table(state))
    return 0


async def _watch_status(client: Client, *, as_json: bool) -> None:
    """On a terminal the table stays in its place; elsewhere one follows another."""
    terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    shown, shown_at = "", 0.0
    async for state in follow(client):
        if as_json:
            sys.stdout.buffer.write(msgspec.json.encode(state) + b"\n")
            sys.stdout.buffer.flush()
            continue
        # Ages change by themselves; that alone is no news.
        rows = "\n".join(f"{p.name}{p.state}{p.reason}{p.pid}{p.restarts}" for p in state.processes)
        news = f"{state.cluster.health}{state.cluster.reason}{rows}{[a.text for a in state.alarms]}"
        if news == shown and (not terminal or time.monotonic() - shown_at < REDRAW_S):
            continue
        shown, shown_at = news, time.monotonic()
        click.echo(f"{CLEAR}{_table(state)}" if terminal else f"{_table(state)}\n")


def _table(state: ClusterState) -> str:
    c = state.cluster
    head = plain(f"{c.name}  {c.public_url}  {c.health}" + (f": {c.reason}" if c.reason else ""))
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
                plain(p.reason),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    ]
    alarms = [plain(f"! {a.subject}: {a.text}") for a in state.alarms]
    return "\n".join([head, *alarms, *lines])


def _age(p: Process) -> str:
    if p.started_at is None or p.pid is None:
        return "-"
    s = int(time.time() - p.started_at)
    return f"{s // 3600}h{s // 60 % 60:02}m" if s >= 3600 else f"{s // 60}m{s % 60:02}s"


def _ms(q: Quantiles) -> str:
    return f"{q.p50:.1f}/{q.p99:.1f}"


@click.command()
@config_option
@command
async def reload(file: str | None) -> int:
    """Read eccon.toml again and apply what changed; a file with a fault changes nothing."""
    config.load(config.find(file))
    async with Client(control_socket(file)) as client:
        await client.reload()
    return 0

"""`eccon doctor`: what is wrong, or will be."""

import asyncio
import sys
from collections.abc import Iterable

import click
import msgspec
import psutil

from eccon import config
from eccon.cli.common import command, config_option, narrate
from eccon.client import Client, ControlError, NotRunning
from eccon.doctor import Finding, examine, exit_code
from eccon.paths import for_cluster

__all__ = ["doctor"]

MARKS = {"ok": "ok", "info": "note", "warning": "WARNING", "error": "ERROR"}
COLOURS = {"ok": "green", "info": "blue", "warning": "yellow", "error": "red"}


@click.command()
@config_option
@click.option("--json", "as_json", is_flag=True, help="All findings as JSON.")
@click.option("-a", "--all", "everything", is_flag=True, help="Also what is as it should be.")
@click.option("--smoke", is_flag=True, help="On a running cluster: send a tiny image through every encoder.")
@click.option(
    "--timeout", type=float, default=60.0, show_default=True, help="Seconds for each request of --smoke."
)
@command
async def doctor(file: str | None, as_json: bool, everything: bool, smoke: bool, timeout: float) -> int:
    """Check host, packages, devices, model and ports against the topology; 1 when there is an error."""
    from eccon.doctor import gather  # noqa: PLC0415  only this command needs it

    topology = config.load(config.find(file))
    paths = for_cluster(topology.name, create=False)
    client = Client(paths.control_socket)
    pids, daemon, guards = await _running(client)
    evidence = await asyncio.to_thread(
        gather.evidence, topology, paths, our_pids=pids, daemon_pid=daemon, guards=guards
    )
    findings = examine(evidence)
    if smoke:
        from eccon.doctor.smoke import smoke as send  # noqa: PLC0415  as above

        findings += await send(client, timeout)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(findings)) + b"\n")
        return exit_code(findings)
    _print(f for f in findings if everything or f.severity != "ok")
    counts = {s: sum(f.severity == s for f in findings) for s in MARKS}
    narrate(
        f"{counts['error']} errors, {counts['warning']} warnings, {counts['info']} notes, "
        f"{counts['ok']} as they should be" + ("" if everything else " (--all shows them)")
    )
    return exit_code(findings)


async def _running(client: Client) -> tuple[set[int], int | None, list[tuple[str, str]]]:
    """Every process of the cluster that runs, its daemon, levels of the guard; nothing when it is down."""
    try:
        state = await client.state()
    except (NotRunning, ControlError):
        return set(), None, []
    pids: set[int] = set()
    for process in state.processes:
        if process.pid is None:
            continue
        try:
            pids |= {process.pid, *(p.pid for p in psutil.Process(process.pid).children(recursive=True))}
        except psutil.Error:
            continue
    guards = [(p.name, p.guard) for p in state.processes if p.guard and p.pid is not None]
    return pids, state.cluster.daemon_pid or None, guards


def _print(findings: Iterable[Finding]) -> None:
    for f in findings:
        mark = click.style(MARKS[f.severity].ljust(8), fg=COLOURS[f.severity], bold=f.severity == "error")
        evidence = f"  ({f.evidence})" if f.evidence else ""
        click.echo(f"{mark} {f.check:<17} {f.text}{evidence}")
        if f.advice:
            click.echo(f"{'':27}→ {f.advice}")

"""One file with what a report needs; also of a cluster whose daemon does not run."""

import os
from pathlib import Path

import click

from eccon import config
from eccon.cli.common import command, config_option, narrate
from eccon.client import Client, NotRunning
from eccon.paths import for_cluster
from eccon.supervisor.diagnostics import bundle

__all__ = ["diagnostics"]


@click.command()
@click.argument("target", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@config_option
@command
async def diagnostics(target: Path, file: str | None) -> int:
    """Write FILE (tar.gz): states, configuration, last logs and requests; secrets masked."""
    path = config.find(file)
    paths = for_cluster(config.cluster_name(path), create=False)
    try:
        async with Client(paths.control_socket) as client:
            data = b"".join([part async for part in client.diagnostics()])
    except NotRunning:
        if not paths.root.is_dir():
            raise
        narrate("no daemon runs; the bundle has what is in its files")
        data = bundle(paths, path, None)
    try:
        _write(target, data)
    except OSError as e:
        narrate(f"eccon: {target}: {e.strerror}")
        return 1
    click.echo(f"{target}: {len(data) / 1024:.0f} KiB")
    return 0


def _write(target: Path, data: bytes) -> None:
    """Whole or not at all, for this user only."""
    fresh = target.with_name(target.name + ".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
        fresh.replace(target)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise

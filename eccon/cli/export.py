"""Commands that write a topology as files which start it without eccon's daemon."""

import getpass
from pathlib import Path

import click

from eccon import config, export
from eccon.cli.common import FAILED, config_option, narrate, plain_command
from eccon.config import Topology

__all__ = ["export_group"]


@click.group(name="export")
def export_group() -> None:
    """Write the topology as the guide's launch scripts, or as systemd units."""


def _output(f: click.decorators.FC) -> click.decorators.FC:
    f = click.option("--force", is_flag=True, help="Write over files that are there.")(f)
    return click.option(
        "-o",
        "--output",
        type=click.Path(file_okay=False, path_type=Path),
        help="Directory; default: export beside eccon.toml.",
    )(f)


def _at(topology: Topology, output: Path | None, kind: str) -> Path:
    return (output or topology.directory / "export" / kind).absolute()


def _write(directory: Path, files: list[export.File], force: bool) -> None:
    for path in export.write(directory, files, force=force):
        click.echo(path)


@export_group.command()
@config_option
@_output
@plain_command
def scripts(file: str | None, output: Path | None, force: bool) -> int:
    """Write serve_ec_llm.sh, serve_ec_encoder.sh, serve_ec_proxy.sh, and serve_ec_all.sh for all of them."""
    topology = config.load(config.find(file))
    directory = _at(topology, output, "scripts")
    try:
        _write(directory, export.scripts(topology, directory), force)
    except export.ExportError as e:
        narrate(f"eccon: {e}")
        return FAILED
    narrate(f"{directory}/serve_ec_all.sh starts the cluster; eccon's daemon knows nothing of it")
    return 0


@export_group.command()
@config_option
@_output
@click.option("--system", is_flag=True, help="For the system's manager instead of the user's own.")
@click.option("--user", help="Whom --system runs the processes as; default: you.")
@plain_command
def systemd(file: str | None, output: Path | None, force: bool, system: bool, user: str | None) -> int:
    """Write a unit for each process and a target for all of them."""
    topology = config.load(config.find(file))
    directory = _at(topology, output, "systemd")
    try:
        files = export.units(topology, directory, system=system, user=user or getpass.getuser())
        _write(directory, files, force)
    except export.ExportError as e:
        narrate(f"eccon: {e}")
        return FAILED
    manager = "systemctl" if system else "systemctl --user"
    narrate(f"{manager} link {directory}/*.service {directory}/*.target")
    narrate(f"{manager} enable --now eccon-{topology.name}.target")
    if not system:
        narrate("`loginctl enable-linger` keeps them running after you log out")
    return 0

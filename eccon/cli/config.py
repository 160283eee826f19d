"""Commands about the configuration file."""

import re
import shlex
from pathlib import Path

import click
import msgspec

from eccon import config, launch, scaffold
from eccon.cli.common import USAGE, config_option, narrate, plain_command
from eccon.paths import for_cluster

__all__ = ["config_group", "init"]


@click.command()
@click.option("--demo", is_flag=True, help="The demo's topology: four encoders on the stand-in.")
@click.option("--name", help="The cluster's name; default: the directory's.")
@click.option("--model", default="Qwen3-VL-8B-Instruct", show_default=True, help="Compiled model directory.")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=Path())
@plain_command
def init(demo: bool, name: str | None, model: str, directory: Path) -> int:
    """Write a commented eccon.toml into DIRECTORY."""
    directory = directory.absolute()
    cluster = name or re.sub(r"[^A-Za-z0-9._-]+", "-", directory.name).strip("-._") or "eccon"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if demo:
            path = scaffold.demo(directory, name=cluster)
        else:
            path = scaffold.guide(directory, name=cluster, model=model)
    except FileExistsError as e:
        narrate(f"eccon: {e.filename}: is there already; it was left as it is")
        return USAGE
    except OSError as e:
        narrate(f"eccon: {e.filename}: {e.strerror}")
        return USAGE
    click.echo(path)
    narrate("`eccon config check` reads it, `eccon up` starts it")
    return 0


@click.group(name="config")
def config_group() -> None:
    """Show or check the configuration."""


@config_group.command()
@config_option
@plain_command
def check(file: str | None) -> int:
    """Read the configuration and name every fault; 0 when there is none."""
    path = config.find(file)
    config.load(path)
    narrate(f"{path}: good")
    return 0


@config_group.command()
@config_option
@click.option("--commands", is_flag=True, help="Exact command and environment of each process.")
@plain_command
def show(file: str | None, commands: bool) -> int:
    """Print the configuration with all defaults, or the commands that it makes."""
    topology = config.load(config.find(file))
    if not commands:
        click.echo(msgspec.json.format(msgspec.json.encode(topology, enc_hook=str)))
        return 0
    paths = for_cluster(topology.name, create=False)
    encoders = [launch.encoder(topology, paths, slot) for slot in launch.slots(topology)]
    proxy = launch.proxy(topology, paths, [e.url for e in encoders])
    for spec in (launch.pd(topology, paths), *encoders, proxy):
        unset = [part for name in spec.unset for part in ("-u", name)]
        variables = [f"{k}={v}" for k, v in spec.env.items()]
        prefix = ["env", *unset, *variables] if unset or variables else []
        click.echo(f"# {spec.name}, in {spec.cwd}")
        click.echo(shlex.join([*prefix, *spec.argv]))
    return 0

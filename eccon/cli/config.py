"""Commands about the configuration file."""

import os
import re
import shlex
from pathlib import Path

import click
import msgspec

from eccon import config, launch, origin, scaffold
from eccon.clashes import remarks
from eccon.cli.common import USAGE, config_option, narrate, plain_command
from eccon.discovery import servers
from eccon.paths import for_cluster
from eccon.scripts.lexer import ScriptError
from eccon.scripts.reader import Command
from eccon.scripts.reader import read as read_script
from eccon.scripts.topology import Found, toml
from eccon.supervisor.secrets import shown, shown_env
from eccon.tomltext import dotted

__all__ = ["config_group", "init"]


@click.command()
@click.option("--demo", is_flag=True, help="The demo's topology: four encoders on the stand-in.")
@click.option(
    "--from-scripts",
    "scripts",
    metavar="PATH",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Read launch scripts: a directory, or files (repeatable). They are read, never run.",
)
@click.option(
    "--running",
    "pd_port",
    is_flag=False,
    flag_value=0,
    type=click.IntRange(0, 65535),
    metavar="[PORT]",
    help="For servers that run on this machine; of several PDs the one on PORT. They stay as they are.",
)
@click.option("--name", help="The cluster's name; default: the directory's.")
@click.option("--model", default="Qwen3-VL-8B-Instruct", show_default=True, help="Compiled model directory.")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=Path())
@plain_command
def init(
    demo: bool,
    scripts: tuple[Path, ...],
    pd_port: int | None,
    name: str | None,
    model: str,
    directory: Path,
) -> int:
    """Write a commented eccon.toml into DIRECTORY."""
    directory = directory.absolute()
    cluster = name or re.sub(r"[^A-Za-z0-9._-]+", "-", directory.name).strip("-._") or "eccon"
    try:
        found = _read_scripts(scripts, cluster) if scripts else None
        if pd_port is not None:
            found = _look_at_running(pd_port, cluster)
        directory.mkdir(parents=True, exist_ok=True)
        if found is not None:
            path = scaffold.write(directory, found.text)
        elif demo:
            path = scaffold.demo(directory, name=cluster)
        else:
            path = scaffold.guide(directory, name=cluster, model=model)
    except ScriptError as e:
        narrate(f"eccon: {e}")
        return USAGE
    except FileExistsError as e:
        narrate(f"eccon: {e.filename}: is there already; it was left as it is")
        return USAGE
    except OSError as e:
        narrate(f"eccon: {e.filename}: {e.strerror}")
        return USAGE
    click.echo(path)
    narrate("`eccon config check` reads it, `eccon up` starts it")
    return 0


def _read_scripts(paths: tuple[Path, ...], name: str) -> Found:
    """Each script by itself, as a shell would start it from here; what is worth knowing is narrated."""
    files = [f for p in paths for f in (sorted(p.glob("*.sh")) if p.is_dir() else [p])]
    if not files:
        msg = f"{paths[0]}: has no *.sh; name the files"
        raise ScriptError(msg)
    commands: list[Command] = []
    for file in files:
        found, guessed = read_script(file, os.environ)
        commands += found
        for command in sorted(guessed):
            narrate(f"note: {file.name}: $({command}) was not run; its value counts as empty")
    topology = toml(commands, name=name)
    for note in topology.notes:
        narrate(f"note: {note}")
    return topology


def _look_at_running(pd_port: int, name: str) -> Found:
    """The group of that PD; 0: the only one there is."""
    from eccon import running  # noqa: PLC0415  only here processes are looked at

    groups = [g for g in running.groups(list(servers())) if pd_port in (0, g.pd.port)]
    if len(groups) != 1:
        there = ", ".join(f"--running {g.pd.port}" for g in groups)
        msg = (
            f"several PDs run; say which: {there}" if groups else "no PD runs here with an encoder of its own"
        )
        raise ScriptError(msg)
    found = running.toml(groups[0], name=name)
    for note in found.notes:
        narrate(f"note: {note}")
    return found


@click.group(name="config")
def config_group() -> None:
    """Show or check the configuration."""


@config_group.command()
@config_option
@plain_command
def check(file: str | None) -> int:
    """Read the configuration and name every fault; 0 when there is none."""
    path = config.find(file)
    text = config.read(path)
    for remark in remarks(config.check(text), text):
        narrate(f"note: {remark}")
    narrate(f"{path}: good")
    return 0


@config_group.command()
@config_option
@click.option("--commands", is_flag=True, help="Exact command and environment of each process.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
@plain_command
def show(file: str | None, commands: bool, as_json: bool) -> int:
    """Print every value in force and its origin, or the commands that it makes; secrets are masked."""
    text = config.read(config.find(file))
    topology = config.check(text)
    if commands:
        _show_commands(topology, as_json)
    elif as_json:
        rows = [
            {"key": dotted(key), "value": value, "origin": where}
            for key, value, where in origin.values(topology, text)
        ]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)))
    else:
        for line in origin.lines(topology, text):
            click.echo(line)
    return 0


def _show_commands(topology: config.Topology, as_json: bool) -> None:
    specs = launch.everything(topology, for_cluster(topology.name, create=False))
    if as_json:
        rows = [
            {
                "name": spec.name,
                "argv": shown(spec.argv),
                "env": dict(shown_env(spec.env)),
                "unset": spec.unset,
                "cwd": spec.cwd,
                "url": spec.url,
                "external": spec.external,
            }
            for spec in specs
        ]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)))
        return
    for spec in specs:
        if spec.external:
            click.echo(f"# {spec.name}: at {spec.url}, started by others")
            continue
        unset = [part for name in spec.unset for part in ("-u", name)]
        variables = [f"{k}={v}" for k, v in shown_env(spec.env)]
        prefix = ["env", *unset, *variables] if unset or variables else []
        click.echo(f"# {spec.name}, in {spec.cwd}")
        click.echo(shlex.join([*prefix, *shown(spec.argv)]))


@config_group.command()
@plain_command
def schema() -> int:
    """Print the JSON Schema of eccon.toml, for editors."""
    from eccon import configschema  # noqa: PLC0415  reads sources; no other command needs it

    click.echo(msgspec.json.format(msgspec.json.encode(configschema.schema())))
    return 0

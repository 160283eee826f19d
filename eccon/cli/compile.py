"""`eccon compile`: the guide's compile step, run in the launcher's environment and looked at afterwards."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import click
import msgspec

from eccon import config
from eccon.cli.common import FAILED, config_option, narrate, plain_command
from eccon.config import ConfigError, Topology
from eccon.launch import compile as compiling
from eccon.launch import versions

__all__ = ["compile"]

HEARTBEAT_S = 30.0
END_S = 10.0


@click.command(name="compile")
@config_option
@click.option("--dry-run", is_flag=True, help="Print the script that would be run, and run nothing.")
@click.option("--force", is_flag=True, help="Put the new model in the place of one that is there.")
@plain_command
def compile(file: str | None, dry_run: bool, force: bool) -> int:  # noqa: A001  the command's name
    """Compile the model into model.path with the options of [compile], in the launcher's environment.

    It is written beside its place and moved there when it is complete and fits the topology.
    """
    topology = config.load(config.find(file), compiled=False)
    if topology.model.hub:
        msg = f"{topology.path}: model.hub = true: a hub's model is not compiled here"
        raise ConfigError(msg)
    directory = topology.directory / topology.model.path
    partial = directory.with_name(f".{directory.name}.partial")
    packages = versions.packages(topology.launcher.vllm, topology.directory)
    names = versions.profile(packages.get("vllm-rbln"), packages.get("optimum-rbln"))
    if dry_run:
        click.echo(compiling.script(topology, names, topology.model.path), nl=False)
        return 0
    python = _compiler(topology, packages)
    if python is None:
        return FAILED
    if directory.exists() and not force:
        narrate(f"eccon: {directory}: is there already; `--force` puts the new one in its place")
        return FAILED
    shutil.rmtree(partial, ignore_errors=True)
    try:
        code = _run(python, compiling.script(topology, names, str(partial)), topology)
        if code != 0:
            narrate(f"eccon: the compiler ended with {_how(code)}; {directory} is as it was")
            return FAILED
        if not _fits(topology, partial):
            narrate(f"eccon: it does not fit the topology and was not put into {directory}")
            return FAILED
        _put(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    click.echo(directory)
    return 0


def _compiler(topology: Topology, packages: dict[str, str]) -> Path | None:
    """The interpreter that has optimum-rbln; says why there is none."""
    launcher = topology.launcher.vllm
    command = versions.command_path(launcher, topology.directory)
    python = versions.python_of(command) if command else None
    if command is None:
        narrate(f"eccon: launcher.vllm = {launcher!r}: no such command; its environment is to compile")
    elif "optimum-rbln" not in packages:
        narrate(
            f"eccon: the environment of {command} has no optimum-rbln, which compiles: `pip install "
            "optimum-rbln` there (it needs the vendor's compiler), or run what `--dry-run` prints elsewhere"
        )
    elif python is None or not python.is_file():
        narrate(f"eccon: which Python {command} runs in cannot be told; `--dry-run` prints the script")
        return None
    else:
        return python
    return None


def _run(python: Path, script: str, topology: Topology) -> int:
    """Runs the script; its words go to stderr, and with them how long it has been going on."""
    narrate(f"compiling {topology.compile.source} with {python}; this takes long")
    began = time.monotonic()
    child = subprocess.Popen(
        [str(python), "-c", script],
        cwd=topology.directory,
        env={**os.environ, **topology.env, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=2,  # stdout is for what was asked: where the model is
        start_new_session=True,
    )
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(HEARTBEAT_S)
            minutes, seconds = divmod(int(time.monotonic() - began), 60)
            narrate(f"… compiling for {minutes} min {seconds:02} s")
    except BaseException:
        _end(child)
        raise


def _end(child: "subprocess.Popen[bytes]") -> None:
    """The compiler has processes of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_S)
            return


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _fits(topology: Topology, directory: Path) -> bool:
    """Whether what was made is complete and fits; says what does not."""
    from eccon.doctor import gather  # noqa: PLC0415  a dry run needs none of it
    from eccon.doctor.checks import model  # noqa: PLC0415  as above

    here = msgspec.structs.replace(
        topology, model=msgspec.structs.replace(topology.model, path=str(directory))
    )
    findings = model.examine(here, gather.compiled(directory), gather.launchers(here, imports=False))
    for f in findings:
        if f.severity == "error":
            narrate(f"eccon: {f.text}" + (f" ({f.evidence})" if f.evidence else "") + f"; {f.advice}")
    return not any(f.severity == "error" for f in findings)


def _put(partial: Path, directory: Path) -> None:
    """Into its place; what was there is gone only when the new one is there."""
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    shutil.rmtree(old, ignore_errors=True)

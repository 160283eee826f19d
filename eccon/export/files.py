"""What both kinds of export have in common: the files themselves, secrets apart, and how to wait for a PD."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from eccon import launch
from eccon.config import Topology
from eccon.launch import ProcessSpec
from eccon.paths import ClusterPaths
from eccon.supervisor.secrets import MASK, shown_env

__all__ = ["SECRETS", "WAIT", "ExportError", "File", "common", "processes", "split_secrets", "write"]

SECRETS = "secrets.env"
WAIT = "wait_ready.py"

WAIT_TEXT = '''\
#!/usr/bin/env python3
"""Waits until URL answers 200, at most SECONDS; exit 1 when it did not. Usage: wait_ready.py URL SECONDS"""

import sys
import time
import urllib.error
import urllib.request

url, end = sys.argv[1], time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                sys.exit(0)
    except (OSError, urllib.error.URLError):
        pass
    time.sleep(0.5)
sys.exit(f"{url} was not ready in {sys.argv[2]} s")
'''


class ExportError(Exception):
    """It cannot be exported; the message says why."""


class File(msgspec.Struct, frozen=True):
    """One file to write."""

    name: str
    text: str
    mode: int = 0o644


def processes(topology: Topology, directory: Path) -> list[ProcessSpec]:
    """What is to be started, its files in `directory` and the proxy's admin socket at its own default."""
    paths = ClusterPaths(directory, directory)
    found = []
    for spec in launch.everything(topology, paths):
        argv = list(spec.argv)
        if spec.name == "proxy":
            at = argv.index("--admin")
            del argv[at : at + 2]
        if not spec.external:
            found.append(msgspec.structs.replace(spec, argv=tuple(argv)))
    return found


def split_secrets(specs: Sequence[ProcessSpec]) -> tuple[list[ProcessSpec], dict[str, str]]:
    """The processes without the secret variables of their environments, and those.

    Raises:
        ExportError: one variable is another secret in another process; they share one file.
    """
    secrets: dict[str, str] = {}
    rest = []
    for spec in specs:
        hidden = {k for k, v in shown_env(spec.env) if v == MASK}
        for name in hidden:
            if secrets.setdefault(name, spec.env[name]) != spec.env[name]:
                msg = f"{spec.name}: {name} differs from another process's; give both the same"
                raise ExportError(msg)
        open_env = {k: v for k, v in spec.env.items() if k not in hidden}
        rest.append(msgspec.structs.replace(spec, env=open_env))
    return rest, secrets


def common(specs: Iterable[ProcessSpec], secrets: dict[str, str]) -> list[File]:
    """The files beside launchers and units alike."""
    files = [File(WAIT, WAIT_TEXT, 0o755)]
    if secrets:
        lines = [f"{name}={_assigned(value)}\n" for name, value in secrets.items()]
        files.append(File(SECRETS, "".join(lines), 0o600))
    asked = {Path(spec.env.get("VLLM_LOGGING_CONFIG_PATH", "")).name for spec in specs}
    for named in (False, True):
        name = ClusterPaths(Path(), Path()).logging_config(named=named).name
        if name in asked:
            files.append(File(name, json.dumps(launch.logging_config(named=named), indent=1) + "\n"))
    return files


def _assigned(value: str) -> str:
    """As bash and systemd's EnvironmentFile both read it.

    Raises:
        ExportError: it has a line end, which only one of them would take.
    """
    if "\n" in value or "\r" in value:
        msg = "a secret with a line end cannot be written to a file of variables"
        raise ExportError(msg)
    return '"' + re.sub(r'(["\\$`])', r"\\\1", value) + '"'


def write(directory: Path, files: Iterable[File], *, force: bool = False) -> list[Path]:
    """Writes all of them, or none.

    Raises:
        ExportError: one is there already, and not forced; or it cannot be written.
    """
    files = list(files)
    taken = [f.name for f in files if (directory / f.name).exists()]
    if taken and not force:
        msg = f"{directory / taken[0]}: is there already; `--force` writes over it"
        raise ExportError(msg)
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            path = directory / file.name
            partial = path.with_name(f".{file.name}.{os.getpid()}")
            # Never readable by others, not even before its mode is set.
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file.mode)
            with os.fdopen(fd, "w", encoding="utf-8") as f:
                f.write(file.text)
            partial.chmod(file.mode)
            partial.replace(path)
            written.append(path)
    except OSError as e:
        msg = f"{e.filename}: {e.strerror}"
        raise ExportError(msg) from e
    return written

"""The guide's launchers: a script for the PD, one for the encoders, one for the proxy, and one for all."""

import shlex
import sys
from pathlib import Path

from eccon.config import Topology
from eccon.export.files import SECRETS, WAIT, File, common, processes, split_secrets
from eccon.launch import ProcessSpec, pd_url
from eccon.model import Role

__all__ = ["scripts"]

_WAIT_FOR_ALL = """\
code=0
for pid in "${pids[@]}"; do
    # A wait that a signal interrupts says nothing of the process: ask until it is gone.
    while true; do
        if wait "$pid"; then its=0; else its=$?; fi
        kill -0 "$pid" 2>/dev/null || break
    done
    if [ "$its" -ne 0 ]; then code=$its; fi
done
exit "$code"
"""

PD, ENCODERS, PROXY, ALL = "serve_ec_llm.sh", "serve_ec_encoder.sh", "serve_ec_proxy.sh", "serve_ec_all.sh"


def scripts(topology: Topology, directory: Path) -> list[File]:
    """Files that are to lie in `directory`.

    Raises:
        ExportError: as `split_secrets`.
    """
    specs, secrets = split_secrets(processes(topology, directory))
    files = common(specs, secrets)
    pd = [s for s in specs if s.role is Role.PD]
    encoders = [s for s in specs if s.role is Role.ENCODER]
    proxy = next(s for s in specs if s.role is Role.PROXY)
    head = _head(topology)
    files += (
        [File(PD, head + _one(pd[0], "Starts the PD. Start it before the encoders."), 0o755)] if pd else []
    )
    if encoders:
        files.append(File(ENCODERS, head + _encoders(topology, encoders), 0o755))
    files.append(
        File(PROXY, head + _one(proxy, "Starts the proxy; it says 503 until the PD is ready."), 0o755)
    )
    files.append(File(ALL, head + _all(bool(pd), bool(encoders)), 0o755))
    return files


def _head(topology: Topology) -> str:
    return f"""\
#!/usr/bin/env bash
# Cluster {_comment(topology.name)}, written by `eccon export scripts` from {_comment(str(topology.path))}.
set -eu
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
if [ -r "$here/{SECRETS}" ]; then set -a; . "$here/{SECRETS}"; set +a; fi
cd -- {shlex.quote(str(topology.directory))}
{_limits(topology)}"""


def _limits(topology: Topology) -> str:
    """As `ulimit` has them: bytes are 1024 at a time there."""
    wanted = topology.supervisor.limits
    named = {
        "-n": wanted.files,
        "-c": _kib(wanted.core_bytes),
        "-l": _kib(wanted.locked_bytes),
        "-v": _kib(wanted.memory_bytes),
        "-u": wanted.processes,
    }
    lines = [f"ulimit {k} {'unlimited' if v < 0 else v}\n" for k, v in named.items() if v is not None]
    return "".join(lines)


def _kib(size: int | None) -> int | None:
    return size if size is None or size < 0 else size // 1024


def _comment(text: str) -> str:
    return text.replace("\n", " ")


def _environment(spec: ProcessSpec) -> str:
    lines = [f"unset {name}\n" for name in spec.unset]
    return "".join([*lines, *(f"export {k}={shlex.quote(v)}\n" for k, v in spec.env.items())])


def _command(spec: ProcessSpec, indent: str = "") -> str:
    """The program and its words, then a flag with its value a line."""
    pinned = ("taskset", "-c", ",".join(map(str, spec.cpus))) if spec.cpus else ()
    lines: list[list[str]] = [[]]
    for word in map(shlex.quote, (*pinned, *spec.argv)):
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(word)
    return f" \\\n{indent}    ".join(" ".join(line) for line in lines)


def _one(spec: ProcessSpec, what: str) -> str:
    return f"# {what}\n\n{_environment(spec)}exec {_command(spec)}\n"


def _encoders(topology: Topology, encoders: list[ProcessSpec]) -> str:
    url = f"{pd_url(topology)}/health"
    wait = f'{shlex.quote(sys.executable)} "$here/{WAIT}" {shlex.quote(url)} '
    wait += f"{topology.supervisor.start_timeout_s:g}"
    functions = "".join(
        f"{_function(e)}() {{\n" + "".join(f"    {line}\n" for line in _environment(e).splitlines())
        + f"    exec {_command(e, '    ')}\n}}\n\n"
        for e in encoders
    )  # fmt: skip
    names = " ".join(e.name for e in encoders)
    return f"""\
# Starts the encoders when the PD is ready; TERM and Ctrl-C end them.
# Usage: {ENCODERS} [NAME]...      (one or several of: {names})

{functions}pids=()
stop() {{ kill "${{pids[@]}}" 2>/dev/null || true; }}
trap stop INT TERM
{wait} & pids=($!)
wait "${{pids[0]}}" || exit 1
pids=()
if [ $# -eq 0 ]; then set -- {names}; fi
for name in "$@"; do
    case "$name" in
        {" | ".join(e.name for e in encoders)}) ;;
        *) echo "no encoder is called $name; there are {names}" >&2; exit 2 ;;
    esac
done
for name in "$@"; do
    # In the background a function has a shell of its own, which becomes the server.
    "${{name//-/_}}" &
    pids+=($!)
done
{_WAIT_FOR_ALL}"""


def _function(spec: ProcessSpec) -> str:
    return spec.name.replace("-", "_")


def _all(pd: bool, encoders: bool) -> str:
    started = [PROXY, *([PD] if pd else []), *([ENCODERS] if encoders else [])]
    lines = "".join(f'"$here/{name}" & pids+=($!)\n' for name in started)
    return f"""\
# Starts everything; TERM and Ctrl-C end it. Logs go to where this script's output goes.

pids=()
stop() {{ kill "${{pids[@]}}" 2>/dev/null || true; }}
trap stop INT TERM
{lines}{_WAIT_FOR_ALL}"""

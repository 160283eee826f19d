"""systemd units: one a process, the PD before its encoders, and a target for all of them."""

import sys
from pathlib import Path

from eccon.config import Topology
from eccon.export.files import SECRETS, WAIT, ExportError, File, common, processes, split_secrets
from eccon.launch import ProcessSpec
from eccon.launch.versions import command_path
from eccon.model import Role

__all__ = ["SWEEP", "units"]

SWEEP = "sweep.sh"

SWEEP_TEXT = """\
#!/bin/sh
# Ends what a unit's main process left behind in its control group, as KillMode=process leaves it alone:
# vLLM's engine outlives a killed server, and holds its NPU and ports.
# Usage: sweep.sh [DIRECTORY OF THE CONTROL GROUP]
group=${1:-/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)}
group=${group%/.control}

left() {
    for pid in $(cat "$group/cgroup.procs" 2>/dev/null); do
        # Not this script, nor what it runs itself.
        [ "$pid" = $$ ] || [ "$(ps -o ppid= -p "$pid" 2>/dev/null | tr -d ' ')" = $$ ] || echo "$pid"
    done
}

for signal in TERM KILL; do
    for pid in $(left); do kill -s "$signal" "$pid" 2>/dev/null; done
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        [ -n "$(left)" ] || exit 0
        sleep 0.5
    done
done
"""


def units(topology: Topology, directory: Path, *, system: bool = False, user: str = "") -> list[File]:
    """Files that are to lie in `directory`; the units refer to the others there by absolute path.

    Args:
        system: for the system's manager, run as `user`; else for the user's own.

    Raises:
        ExportError: a command is not on this host, or as `split_secrets`.
    """
    specs, secrets = split_secrets(processes(topology, directory))
    files = [*common(specs, secrets), File(SWEEP, SWEEP_TEXT, 0o755)]
    names = {spec.name: f"{_unit_name(topology)}-{spec.name}.service" for spec in specs}
    for spec in specs:
        after = [names["pd"]] if spec.role is Role.ENCODER and "pd" in names else []
        text = _unit(topology, directory, spec, after, bool(secrets), user if system else "")
        files.append(File(names[spec.name], text))
    wanted = "multi-user.target" if system else "default.target"
    files.append(
        File(
            f"{_unit_name(topology)}.target",
            f"[Unit]\nDescription=Cluster {_percent(topology.name)}\nWants={' '.join(names.values())}\n\n"
            f"[Install]\nWantedBy={wanted}\n",
        )
    )
    return files


def _unit_name(topology: Topology) -> str:
    return f"eccon-{topology.name}"


def _unit(
    topology: Topology, directory: Path, spec: ProcessSpec, after: list[str], secrets: bool, user: str
) -> str:
    policy = topology.supervisor
    order = [f"Wants={name}\nAfter={name}" for name in after]
    wait = _words(
        [sys.executable, str(directory / WAIT), f"{spec.url}/health", f"{policy.start_timeout_s:g}"]
    )
    ready = [f"ExecStartPost=:{wait}"] if spec.role is Role.PD else []
    lines = [
        "[Unit]",
        f"Description={_percent(f'{spec.name} of cluster {topology.name}')}",
        f"PartOf={_unit_name(topology)}.target",
        *order,
        # A PD that dies at once again and again is for an operator to look at.
        f"StartLimitIntervalSec={policy.backoff_reset_s:g}",
        f"StartLimitBurst={policy.failures}",
        "",
        "[Service]",
        "Type=exec",
        *([f"User={user}"] if user else []),
        f"WorkingDirectory={_percent(spec.cwd)}",
        *(f"Environment={_quoted(f'{k}={v}')}" for k, v in spec.env.items()),
        *([f"UnsetEnvironment={' '.join(spec.unset)}"] if spec.unset else []),
        *([f"EnvironmentFile={_percent(str(directory / SECRETS))}"] if secrets else []),
        # The colon: words are taken as they are, nothing is put in place of a $.
        f"ExecStart=:{_words([_absolute(topology, spec.argv[0]), *spec.argv[1:]])}",
        *ready,
        f"ExecStopPost=-:{_words([str(directory / SWEEP)])}",
        f"TimeoutStartSec={policy.start_timeout_s + 60:g}",
        f"TimeoutStopSec={policy.stop_grace_s:g}",
        "KillMode=process",
        "Delegate=yes",
        "Restart=always",
        f"RestartSec={policy.backoff_s:g}",
        *([f"CPUAffinity={' '.join(map(str, spec.cpus))}"] if spec.cpus else []),
        *_limits(topology),
        "",
        "[Install]",
        f"WantedBy={_unit_name(topology)}.target",
    ]
    return "\n".join(lines) + "\n"


def _limits(topology: Topology) -> list[str]:
    wanted = topology.supervisor.limits
    named = {
        "LimitNOFILE": 65536 if wanted.files is None else wanted.files,
        "LimitCORE": wanted.core_bytes,
        "LimitMEMLOCK": wanted.locked_bytes,
        "LimitAS": wanted.memory_bytes,
        "LimitNPROC": wanted.processes,
    }
    return [f"{k}={'infinity' if v < 0 else v}" for k, v in named.items() if v is not None]


def _absolute(topology: Topology, command: str) -> str:
    found = command_path(command, topology.directory)
    if found is None:
        msg = f"{command}: no such command on this host; systemd needs its path: set launcher.vllm to it"
        raise ExportError(msg)
    return str(found.absolute())


def _percent(text: str) -> str:
    return text.replace("%", "%%").replace("\n", " ")


def _quoted(word: str) -> str:
    inside = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("%", "%%")
    return f'"{inside}"'


def _words(argv: list[str]) -> str:
    return " ".join(map(_quoted, argv))

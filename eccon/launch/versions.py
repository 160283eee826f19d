"""What differs by the packages that a launcher runs, read from their metadata without importing anything."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from eccon.config import Topology

__all__ = [
    "PACKAGES",
    "Profile",
    "Vllm",
    "command_path",
    "device_variables",
    "installed",
    "launchers",
    "number",
    "packages",
    "profile",
    "python_of",
    "site_packages",
    "vllm",
]

PACKAGES = ("vllm", "vllm-rbln", "optimum-rbln", "rebel-compiler", "nixl", "torch", "transformers")
"""Those whose versions matter here."""


class Profile(msgspec.Struct, frozen=True):
    """What a version calls things."""

    device_variable: str
    unset: tuple[str, ...]
    """Must not be inherited beside it."""
    visual_size: str
    """optimum-rbln's option for the visual encoder's longest sequence."""
    devices: str
    """optimum-rbln's option for the number of devices."""
    wire: int
    """Metadata between encoder and PD; another number is not understood."""


def profile(vllm_rbln: str | None, optimum_rbln: str | None = None) -> Profile:
    """Of the installed versions; a package that is not there counts as old for vllm-rbln, else as its pair.

    vllm-rbln 0.12 renamed RBLN_DEVICES to RBLN_VISIBLE_DEVICES and still reads the old one, but an inherited
    empty new one wins and means all devices: exactly one may be set. It also changed the wire.
    optimum-rbln 0.10.4 takes `max_seq_len` only, 0.12 `num_devices` (the old name is deprecated there).
    """
    rbln = number(vllm_rbln)
    optimum = number(optimum_rbln or vllm_rbln or "0.12")
    new = rbln >= (0, 12)
    return Profile(
        device_variable="RBLN_VISIBLE_DEVICES" if new else "RBLN_DEVICES",
        unset=("RBLN_DEVICES",) if new else ("RBLN_VISIBLE_DEVICES",),
        visual_size="max_seq_len" if optimum >= (0, 10, 4) else "max_seq_lens",
        devices="num_devices" if optimum >= (0, 12) else "tensor_parallel_size",
        wire=2 if new else 1,
    )


class Vllm(msgspec.Struct, frozen=True, kw_only=True):
    """What a release of vLLM does where releases differ, as the contract tests show on CPU.

    vLLM without a version, or of one that was not tried, is taken for the nearest one before it that was.
    """

    names_records: bool
    """Log records know their process's name, and only a format with `%(vllm_process_name)s` shows it. Before,
    every line of a subprocess began with `(name pid=N) `, whatever its format."""
    trusting: tuple[str, ...]
    """Flags with which requests may bring `mm_processor_kwargs` and `media_io_kwargs`; () where they always
    may. Without these flags such requests are refused with 400."""
    told: str
    """For people: what is different; "" where nothing is."""


KNOWN: tuple[tuple[tuple[int, ...], Vllm], ...] = (
    (
        (0, 32),
        Vllm(
            names_records=True,
            trusting=("--trust-request-mm-kwargs",),
            told="a request's mm_processor_kwargs and media_io_kwargs are refused with 400, "
            "unless PD and encoders get --trust-request-mm-kwargs",
        ),
    ),
    ((), Vllm(names_records=False, trusting=(), told="")),
)
"""First release that does so, newest first. Measured with vLLM 0.32.0 and 0.30.0."""


def vllm(version: str | None) -> Vllm:
    """Of a version of vLLM."""
    return next(known for first, known in KNOWN if number(version) >= first)


def number(version: str | None) -> tuple[int, ...]:
    """`0.11.2.dev3+cpu` as (0, 11, 2); () of None."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version or "")
    return tuple(int(n) for n in found[1].split(".")) if found else ()


def command_path(command: str, directory: Path) -> Path | None:
    """The file that `command` runs when started in `directory`; None when there is none."""
    found = shutil.which(str(directory / command) if "/" in command else command)
    return Path(found) if found else None


def python_of(command: Path) -> Path | None:
    """The interpreter that a console script names in its first lines; None when it names none."""
    try:
        with command.open("rb") as f:
            head = f.read(1024).decode("utf-8", "replace").split("\n")[:3]
    except OSError:
        return None
    if not head[0].startswith("#!"):
        return None
    found = re.search(r"(/[^\s\"']*/python[\d.]*)", "\n".join(head))
    return Path(found[1]) if found else None


def site_packages(command: Path) -> Iterator[Path]:
    """Where the packages of the environment of `command` are, nearest first."""
    seen = set()
    python = python_of(command)
    places = [command.parent, command.resolve().parent, *([python.parent] if python else [])]
    for prefix in (place.parent for place in places):
        for pattern in ("lib*/python3*/site-packages", "lib*/python3*/dist-packages"):
            for here in sorted(prefix.glob(pattern)):
                if here not in seen:
                    seen.add(here)
                    yield here


def installed(vllm: str, distribution: str, directory: Path = Path()) -> str | None:
    """Version of `distribution` in the environment of the command `vllm`; None when it is not there."""
    command = command_path(vllm, directory)
    if command is None:
        return None
    wanted = _plain(distribution)
    for here in site_packages(command):
        for info in sorted(here.glob("*.dist-info")):
            name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
            if _plain(name) == wanted:
                return version
    return None


def packages(vllm: str, directory: Path = Path()) -> dict[str, str]:
    """Versions of PACKAGES in the environment of the command `vllm`, those that are there."""
    found = ((name, installed(vllm, name, directory)) for name in PACKAGES)
    return {name: version for name, version in found if version}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def device_variables(topology: Topology, vllm: str | None = None) -> tuple[str, tuple[str, ...]]:
    """The variable that lists a process's devices, and those that must not be inherited beside it."""
    if topology.devices.kind == "cuda":
        return "CUDA_VISIBLE_DEVICES", ()
    version = installed(vllm or topology.launcher.vllm, "vllm-rbln", topology.directory)
    found = profile(version)
    return found.device_variable, found.unset


def launchers(topology: Topology) -> dict[str, str]:
    """The vllm command of each process that is started here, by process name."""
    general, common = topology.launcher.vllm, topology.encoders
    if topology.launcher.kind != "vllm":
        return {}
    found = {} if topology.pd.external else {"pd": topology.pd.vllm or general}
    for i in range(common.count):
        own = common.overridden(i)
        if not own.external:
            found[f"encoder-{i}"] = own.vllm or common.vllm or general
    return found

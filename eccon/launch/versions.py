"""What differs by the vllm-rbln that the launcher runs, read from its metadata without importing anything."""

import shutil
from pathlib import Path

from eccon.config import Topology

__all__ = ["device_variables", "installed"]


def installed(vllm: str, distribution: str) -> str | None:
    """Version of `distribution` in the environment of the command `vllm`; None when it is not there."""
    command = shutil.which(vllm)
    if command is None:
        return None
    wanted = distribution.replace("-", "_") + "-"
    bin_directory = Path(command).resolve().parent
    for here in {Path(command).parent, bin_directory}:
        for info in sorted(here.parent.glob(f"lib/python3.*/site-packages/{wanted}*.dist-info")):
            return info.name[len(wanted) : -len(".dist-info")]
    return None


def device_variables(topology: Topology) -> tuple[str, tuple[str, ...]]:
    """The variable that lists a process's devices, and those that must not be inherited beside it.

    vllm-rbln 0.12 renamed RBLN_DEVICES to RBLN_VISIBLE_DEVICES and still reads the old one, but an inherited
    empty new one wins and means all devices: exactly one may be set.
    """
    if topology.devices.kind == "cuda":
        return "CUDA_VISIBLE_DEVICES", ()
    version = installed(topology.launcher.vllm, "vllm-rbln") or ""
    numbers = [int(n) for n in version.split(".")[:2] if n.isdigit()]
    if numbers >= [0, 12]:
        return "RBLN_VISIBLE_DEVICES", ("RBLN_DEVICES",)
    return "RBLN_DEVICES", ("RBLN_VISIBLE_DEVICES",)

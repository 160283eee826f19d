"""Whether a process gets the guarded connector, and what it is told then.

It is a package of its own that runs in vLLM's environment: its directory goes on PYTHONPATH, nothing is
installed. It looks once more at what it finds there, and steps down by itself.
"""

import os
from pathlib import Path
from typing import Any, Literal

from eccon.config import Topology
from eccon.connector import CLASS, DIRECTORY, MODULE
from eccon.connector.eccon_guard.check import PROVEN
from eccon.launch.versions import installed
from eccon.paths import ClusterPaths

__all__ = ["KEYS", "PROVEN", "environment", "mode", "told", "transfer"]

VENDOR = "RblnECNixlConnector"
MEETING_MAX = 80
"""Bytes of a directory in which the guard's two halves can meet: a socket's path has 107."""
KEYS = frozenset(
    {
        *("guard_crc", "guard_delivery_wait_s", "guard_pull_timeout_s"),
        *("guard_staged_ttl_s", "guard_staging_bytes"),
    }
)
"""What `connector.extra` may say of it beside `connector.guard` and `connector.guard_wait_s`."""


def mode(topology: Topology, vllm: str) -> Literal["off", "auto", "on"]:
    """What the process of the command `vllm` gets.

    `auto` is on with exactly the versions that it was proven with, never with the guide's profile, which
    passes the guide's flags and no more, nor with the stand-in, which is to be as the vendor's is.
    """
    c = topology.connector
    if c.kind != VENDOR or c.guard == "off":
        return "off"
    if c.guard == "on":
        return "on"
    if topology.launcher.kind != "vllm" or topology.launcher.profile != "safe":
        return "off"
    found = tuple((installed(vllm, p) or "").partition("+")[0] for p in ("vllm", "vllm-rbln"))
    return "auto" if found in PROVEN else "off"


def transfer() -> dict[str, Any]:
    """Keys of `--ec-transfer-config`."""
    return {"ec_connector": CLASS, "ec_connector_module_path": MODULE}


def told(
    topology: Topology, paths: ClusterPaths, chosen: Literal["auto", "on"], name: str, ttl_s: float
) -> dict[str, Any]:
    """Keys of `ec_connector_extra_config`. `ttl_s` is how long an encoder would keep an item."""
    return {
        "guard": chosen,
        "guard_wait_s": topology.connector.guard_wait_s,
        "guard_staged_ttl_s": ttl_s,
        "guard_name": name,
        "guard_events": str(paths.guard_socket),
    } | _meeting(paths.sockets / "guard")


def _meeting(directory: Path) -> dict[str, str]:
    """Below the cluster's own directory, where nobody else can be in the way, if a path fits there."""
    return {"guard_directory": str(directory)} if len(os.fsencode(directory)) <= MEETING_MAX else {}


def environment(topology: Topology, own: dict[str, str]) -> dict[str, str]:
    """PYTHONPATH with the guard first, before whatever the process would get."""
    before = own.get("PYTHONPATH", topology.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")))
    return {"PYTHONPATH": f"{DIRECTORY}{os.pathsep}{before}" if before else str(DIRECTORY)}

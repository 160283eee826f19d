"""API keys: where they come from, and that they reach children by environment or file, never by argv."""

import os
from pathlib import Path

from eccon.config import Topology

__all__ = ["client_key", "serving_key"]


def serving_key(topology: Topology) -> str:
    """What PD and encoders ask for: of `model.api_key_file`, `[env]`, else inherited; empty: nothing."""
    if topology.model.api_key_file:
        return _first(topology.directory / topology.model.api_key_file)
    return topology.env.get("VLLM_API_KEY", os.environ.get("VLLM_API_KEY", ""))


def client_key(topology: Topology) -> str:
    """One that the proxy takes from clients, for eccon's own test prompts; empty: it asks for none."""
    if topology.proxy.api_key_file:
        return _first(topology.directory / topology.proxy.api_key_file)
    variable = "ECCON_PROXY_API_KEYS"
    given = (topology.env | topology.proxy.env).get(variable, os.environ.get(variable, ""))
    return given.partition(",")[0].strip()


def _first(path: Path) -> str:
    """Empty too when the file went away since the configuration was read, which names it as a fault."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    return next((line.strip() for line in lines if line.strip()), "")

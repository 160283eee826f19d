"""API keys: where they come from, and that they reach children by environment or file, never by argv."""

import os
from pathlib import Path

from eccon.config import Topology

__all__ = ["serving_key"]


def serving_key(topology: Topology) -> str:
    """What PD and encoders ask for: of `model.api_key_file`, `[env]`, else inherited; empty: nothing."""
    if topology.model.api_key_file:
        lines = (topology.directory / Path(topology.model.api_key_file)).read_text("utf-8").splitlines()
        return next((line.strip() for line in lines if line.strip()), "")
    return topology.env.get("VLLM_API_KEY", os.environ.get("VLLM_API_KEY", ""))

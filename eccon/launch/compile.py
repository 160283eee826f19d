"""The compile step as a script for optimum-rbln, in the words of the version that is installed. Pure."""

import json
from typing import Any

from eccon.config import Topology
from eccon.launch.versions import Profile

__all__ = ["options", "script"]

CLASS = "RBLNQwen3VLForConditionalGeneration"


def options(topology: Topology, profile: Profile) -> dict[str, Any]:
    """`rbln_config` of the whole model."""
    c = topology.compile
    visual: dict[str, Any] = {
        profile.visual_size: c.visual_max_seq_len,
        profile.devices: c.visual_devices,
    }
    return {
        "visual": visual | c.visual_extra,
        profile.devices: c.devices or len(topology.pd.devices) or 1,
        "max_seq_len": c.max_seq_len,
        "batch_size": c.batch_size,
        "decoder_batch_sizes": c.decoder_batch_sizes or [c.batch_size],
    } | c.extra


def script(topology: Topology, profile: Profile, target: str) -> str:
    """Python that compiles `compile.source` and saves it to `target`, a path below its working directory."""
    config = _python(options(topology, profile))
    return f"""\
from optimum.rbln import {CLASS}

model = {CLASS}.from_pretrained(
    {_python(topology.compile.source)},
    export=True,
    rbln_config={config.replace(chr(10), chr(10) + "    ")},
)
model.save_pretrained({_python(target)})
"""


def _python(value: Any) -> str:
    """As Python writes it, a key a line."""
    if isinstance(value, dict):
        lines = [f"    {_python(k)}: {_python(v)},".replace("\n", "\n    ") for k, v in value.items()]
        return "{\n" + "\n".join(lines) + "\n}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)

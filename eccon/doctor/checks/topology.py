"""What PD and encoders are told: the same things, and nothing that breaks them."""

import json
from collections.abc import Iterator
from pathlib import Path

from eccon.doctor.evidence import Evidence
from eccon.doctor.finding import Finding, bad, good, note, warn
from eccon.launch import ProcessSpec, connectors, identity, sends_held_again
from eccon.model import Role

__all__ = ["connector_bounds", "connector_parameters", "forbidden_flags", "same_model_and_pixels", "secrets"]

COMPILED_IN = {
    "--max-model-len": "max_seq_len",
    "--max-num-seqs": "batch_size",
    "--block-size": "the compiled block size",
    "--tensor-parallel-size": "the compiled number of devices",
    "-tp": "the compiled number of devices",
}
"""Flags that a compiled directory answers for."""
SECONDS_AN_IMAGE = 13.8
"""Of an 8B model's visual encoder on one NPU, as its vendor measured."""


def _serves(e: Evidence) -> list[ProcessSpec]:
    return [s for s in e.specs if s.role is not Role.PROXY and not s.external]


def _flag(spec: ProcessSpec, name: str) -> str:
    """The last value of a flag, as vLLM takes it; empty: not given."""
    found = ""
    for i, word in enumerate(spec.argv):
        flag, eq, value = word.partition("=")
        if flag.replace("_", "-") == name:
            found = value if eq else next(iter(spec.argv[i + 1 : i + 2]), "")
    return found


def same_model_and_pixels(e: Evidence) -> Iterator[Finding]:
    """The model's name is hashed as written, max_pixels is not and changes the shapes."""
    specs = _serves(e)
    models = {s.argv[s.argv.index("serve") + 1] for s in specs if "serve" in s.argv}
    kwargs = {_flag(s, "--mm-processor-kwargs") for s in specs}
    if len(models) > 1:
        advice = "serve the same string on both sides"
        yield bad("same-model", "PD and encoders serve different model strings", " and ".join(sorted(models)),
                  advice=advice)  # fmt: skip
    if len({json.dumps(json.loads(k or "{}"), sort_keys=True) for k in kwargs}) > 1:
        advice = "set model.max_pixels, which all get"
        evidence = " and ".join(sorted(k or "none" for k in kwargs))
        yield bad("same-pixels", "PD and encoders have different --mm-processor-kwargs", evidence,
                  advice=advice)  # fmt: skip
    if len(models) == 1 and len(kwargs) == 1:
        yield good("same-model", f"all serve {next(iter(models))!r} with {next(iter(kwargs)) or 'no limits'}")
    if external := [s.name for s in e.specs if s.external]:
        advice = "start them with the same model string and max_pixels"
        yield note("same-model", f"{', '.join(external)}: started by others, not looked at", "", advice)


def forbidden_flags(e: Evidence) -> Iterator[Finding]:
    """Flags that contradict a compiled model, or turn off what identities need."""
    fine = True
    for spec in _serves(e):
        for flag, what in COMPILED_IN.items():
            if e.topology.devices.kind == "rbln" and _given(spec, flag):
                fine = False
                advice = f"leave {flag} out: it follows from {what} in the model's rbln_config.json"
                yield bad("forbidden-flag", f"{spec.name} is given {flag}", _flag(spec, flag), advice=advice)
        if _flag(spec, "--mm-processor-cache-gb") in {"0", "0.0"}:
            fine = False
            advice = "leave it out: without that cache items have no names that the other side knows"
            yield bad("forbidden-flag", f"{spec.name} is given --mm-processor-cache-gb 0", advice=advice)
    if fine:
        yield good("forbidden-flag", "no flag contradicts the compiled model or the connector")


def _given(spec: ProcessSpec, flag: str) -> bool:
    return any(word.partition("=")[0].replace("_", "-") == flag for word in spec.argv)


def connector_bounds(e: Evidence) -> Iterator[Finding]:
    """How long and how much an encoder keeps, against how long an encode takes."""
    t = e.topology
    rooms = connectors.rooms(t)
    if rooms is not None:
        evidence = f"ttl {rooms.ttl_s:g} s, capacity {rooms.capacity}, pulls {rooms.pulls}"
        eight = SECONDS_AN_IMAGE * -(-8 // t.encoders.count)
        if rooms.ttl_s < 2 * eight and t.devices.kind == "rbln":
            advice = 'use launcher.profile = "safe", or raise connector.encoder_extra.producer_cache_ttl_s'
            text = (
                f"eight images may take {eight:.0f} s to encode here, an encoder keeps them {rooms.ttl_s:g} s"
            )
            yield warn("connector-bounds", text, evidence, advice=advice)
        else:
            yield good("connector-bounds", "the encoders keep what they encode long enough", evidence)
        if not sends_held_again(t):
            advice = 'remove it from [proxy.settings]: "attempt" is the safe one'
            text = f"identity {identity(t)!r}: an item that an encoder still holds is not sent again"
            yield warn("identity", text, advice=advice)
    elif t.connector.kind == "ECExampleConnector" and identity(t) == "attempt":
        advice = 'clear the directory at times, or set identity = "content" in [proxy.settings]'
        text = "ECExampleConnector leaves a file an image, and never removes one"
        yield warn("connector-bounds", text, t.connector.shared_storage_path, advice=advice)


def connector_parameters(e: Evidence) -> Iterator[Finding]:
    """Two connectors find an item by parameters of the encoder's answer, which eccon-proxy does not carry on.

    As read in vLLM 0.30.
    """
    kind = e.topology.connector.kind
    advice = "use ECExampleConnector or RblnECNixlConnector"
    if kind == "ECMooncakeConnector":
        text = "ECMooncakeConnector's PD waits for transfer ids, which eccon-proxy does not carry on"
        yield bad("connector-parameters", text, advice=advice)
    elif kind == "ECCPUConnector":
        text = "ECCPUConnector's PD encodes each image again: eccon-proxy does not carry on where it is"
        yield warn("connector-parameters", text, advice=advice)


def secrets(e: Evidence) -> Iterator[Finding]:
    """Keys lie where only their owner reads them."""
    for path, mode in e.key_files.items():
        if mode & 0o077:
            advice = f"chmod 600 {Path(path).name}"
            yield warn("secrets", f"{path} can be read by others", f"mode {mode:o}", advice=advice)
        else:
            yield good("secrets", f"{path} is readable by its owner only")

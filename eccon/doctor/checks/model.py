"""The compiled model directory against the topology, by what optimum-rbln wrote into it. Nothing is imported.

The names are those of optimum-rbln 0.12 and, where they differ, of 0.10 and 0.11.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from eccon import launch
from eccon.config import Topology
from eccon.doctor.evidence import Compiled, Evidence, Launcher
from eccon.doctor.finding import Finding, bad, good, note
from eccon.launch.versions import number
from eccon.paths import ClusterPaths
from eccon.signals.devices import numbers

__all__ = [
    "batch_buckets",
    "compiler_version",
    "device_counts",
    "examine",
    "files_complete",
    "image_size",
    "is_compiled",
    "visual_lengths",
]

CLASS = "RBLNQwen3VLForConditionalGenerationConfig"
PATCH = 16
"""Pixels of a patch's side in Qwen3-VL, where config.json does not say."""


def _compiled(e: Evidence) -> Compiled | None:
    """The directory, where it has to be a compiled one."""
    return e.compiled if e.topology.devices.kind == "rbln" and not e.topology.model.hub else None


def _config(e: Evidence) -> tuple[Compiled, dict[str, Any]] | None:
    found = _compiled(e)
    return (found, found.rbln) if found is not None and found.rbln is not None else None


def is_compiled(e: Evidence) -> Iterator[Finding]:
    """A Qwen3-VL that optimum-rbln compiled, and not in its legacy form."""
    found = _compiled(e)
    if found is None:
        return
    for fault in found.faults:
        yield bad("model-compiled", "a file of the model cannot be read", fault, advice="compile it again")
    if found.rbln is None:
        advice = "compile it: `eccon compile`"
        yield bad("model-compiled", "the model directory is not compiled: it has no rbln_config.json",
                  found.directory, advice=advice)  # fmt: skip
        return
    name = str(found.rbln.get("cls_name", ""))
    if "_meta" in found.rbln:
        advice = "compile it again with the installed optimum-rbln"
        yield bad("model-compiled", "rbln_config.json is of a legacy form (it has _meta)", found.directory,
                  advice=advice)  # fmt: skip
    elif name != CLASS:
        advice = "only the dense Qwen3-VL family can be served with separate encoders"
        yield bad("model-compiled", f"the model is a {name or 'model without a class'}", found.directory,
                  advice=advice)  # fmt: skip
    else:
        yield good("model-compiled", f"{found.directory} is a compiled Qwen3-VL")


def _count(config: Mapping[str, Any]) -> int | None:
    """Devices that it was compiled for: `num_devices`, before 0.12 `tensor_parallel_size`."""
    parts = config.get("_compile_cfgs")
    first = parts[0] if isinstance(parts, list) and parts and isinstance(parts[0], dict) else {}
    for place in (first, config):
        for name in ("num_devices", "tensor_parallel_size"):
            if isinstance(place.get(name), int):
                return int(place[name])
    return None


def device_counts(e: Evidence) -> Iterator[Finding]:
    """As many devices as the model was compiled for, on either side."""
    found = _config(e)
    if found is None:
        return
    compiled, config = found
    for role, part, key in (("pd", config, "pd.devices"), ("encoder", compiled.visual, "encoders.devices")):
        wants = _count(part)
        specs = [s for s in e.specs if s.role.value == role and not s.external]
        wrong = [s for s in specs if wants is not None and len(numbers(s.device)) != wants]
        if wants is None:
            yield note("model-devices", f"for how many devices the {role}'s part was compiled cannot be told")
        elif wrong:
            advice = f"give it {wants} in {key}, or compile for as many as it has"
            has = len(numbers(wrong[0].device))
            text = f"{wrong[0].name} has {has} devices, the model was compiled for {wants}"
            yield bad("model-devices", text, compiled.directory, advice=advice)
        elif specs:
            yield good("model-devices", f"{role}: {wants} device{'s' * (wants > 1)}, as compiled")


def compiler_version(e: Evidence) -> Iterator[Finding]:
    """Artefacts of another minor version cannot be loaded."""
    found = _config(e)
    if found is None:
        return
    by = str(found[1].get("optimum_rbln_version", ""))
    if not by:
        yield note("model-version", "by which optimum-rbln it was compiled cannot be told")
    for launcher in e.launchers:
        here = launcher.packages.get("optimum-rbln")
        if not by or here is None:
            continue
        if number(by)[:2] != number(here)[:2]:
            advice = "compile it again with the installed version: `eccon compile`"
            text = f"compiled by optimum-rbln {by}, {here} is installed"
            yield bad("model-version", text, launcher.path, advice=advice)
        else:
            yield good("model-version", f"compiled by optimum-rbln {by}, {here} is installed")


def files_complete(e: Evidence) -> Iterator[Finding]:
    """Every graph that the configuration lists."""
    found = _config(e)
    if found is None:
        return
    compiled, config = found
    listed = [
        f"{where}{part['compiled_model_name']}.rbln"
        for where, of in (("", config), ("visual/", compiled.visual))
        for part in of.get("_compile_cfgs", [])
        if isinstance(part, dict) and part.get("compiled_model_name")
    ]
    if missing := [name for name in listed if name not in compiled.files]:
        advice = "copy the whole directory, or compile it again"
        yield bad("model-files", f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
                  compiled.directory, advice=advice)  # fmt: skip
    elif listed:
        yield good("model-files", f"all {len(listed)} compiled graphs are there")


def visual_lengths(visual: Mapping[str, Any]) -> list[int]:
    """Patches that the visual encoder was compiled for, one number a graph."""
    value = visual.get("max_seq_len", visual.get("max_seq_lens"))
    values = value if isinstance(value, list) else [value]
    return [int(v) for v in values if isinstance(v, int)]


def image_size(e: Evidence) -> Iterator[Finding]:
    """The largest image in patches must fit the visual encoder: a larger one ends the encoder's engine."""
    found = _config(e)
    if found is None:
        return
    compiled, _ = found
    lengths = visual_lengths(compiled.visual)
    patch = compiled.config.get("vision_config", {}).get("patch_size", PATCH)
    if not lengths:
        yield note("model-pixels", "how large an image the visual encoder takes cannot be told")
        return
    most = max(lengths) * patch**2
    pixels = e.topology.model.max_pixels
    if pixels is None:
        usual = compiled.processor.get("size", {}).get("longest_edge") or compiled.processor.get("max_pixels")
        evidence = f"the model's own limit is {usual}" if usual else ""
        advice = f"set model.max_pixels to at most {most}"
        yield bad("model-pixels", "no max_pixels is set: a large image ends the encoder's engine", evidence,
                  advice=advice)  # fmt: skip
        return
    patches = pixels // patch**2
    if patches > max(lengths):
        advice = f"set model.max_pixels to at most {most}, or compile for {patches} patches"
        text = f"max_pixels {pixels} is {patches} patches, the visual encoder takes {max(lengths)}"
        yield bad("model-pixels", text, compiled.directory, advice=advice)
    else:
        yield good("model-pixels", f"max_pixels {pixels} is {patches} of {max(lengths)} patches")


def batch_buckets(e: Evidence) -> Iterator[Finding]:
    """Decoder shapes: the batch size must be among them, none may be larger."""
    found = _config(e)
    if found is None:
        return
    _, config = found
    batch, buckets = config.get("batch_size"), config.get("decoder_batch_sizes")
    if not isinstance(batch, int) or not isinstance(buckets, list):
        yield note("model-batch", "batch size and decoder shapes cannot be told")
        return
    evidence = f"batch_size {batch}, decoder_batch_sizes {buckets}"
    if batch not in buckets or max(buckets, default=0) > batch:
        advice = "compile with decoder_batch_sizes that end at batch_size"
        yield bad("model-batch", "the decoder's shapes do not fit its batch size", evidence, advice=advice)
        return
    yield good("model-batch", f"up to {batch} requests at a time, in shapes {buckets}")
    if len(buckets) == 1 and batch > 1:
        advice = "compile with several decoder_batch_sizes, as 1, 2, 4 and so on"
        yield note("model-batch", "few requests are computed as slowly as a full batch", evidence, advice)


def examine(topology: Topology, compiled: Compiled, launchers: Iterable[Launcher]) -> list[Finding]:
    """What these checks say of a directory that has just been made."""
    specs = tuple(launch.everything(topology, ClusterPaths(topology.directory, topology.directory)))
    evidence = Evidence(
        topology=topology, specs=specs, python="", launchers=tuple(launchers), compiled=compiled
    )
    checks = (is_compiled, device_counts, compiler_version, files_complete, image_size, batch_buckets)
    return [finding for check in checks for finding in check(evidence)]

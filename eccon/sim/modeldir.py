"""What the stand-in takes from a model directory: sizes, never weights."""

import json
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["Model", "ModelError", "load", "shortened"]


class ModelError(Exception):
    """No model is there; the message is what vLLM would end with."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Qwen3-VL, from config.json and, where it was compiled, from rbln_config.json."""

    architecture: str
    hidden: int
    """Of the language model: width of one visual token's embedding."""
    deepstack: int
    """Layers whose features travel beside the embedding: a tensor is hidden * (1 + deepstack) wide."""
    max_model_len: int
    batch: int
    patch: int
    merge: int
    min_pixels: int
    max_pixels: int

    @property
    def width(self) -> int:
        """Numbers in one row of a tensor."""
        return self.hidden * (1 + self.deepstack)

    def resized(self, kwargs: dict[str, Any]) -> "Model":
        """With a request's own limits of an image's size."""
        limits = {k: int(kwargs[k]) for k in ("min_pixels", "max_pixels") if kwargs.get(k) is not None}
        return msgspec.structs.replace(self, **limits) if limits else self

    @property
    def factor(self) -> int:
        """Pixels of one visual token's side."""
        return self.patch * self.merge


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        msg = f"OSError: {path} could not be read as JSON: {e}"
        raise ModelError(msg) from e
    if not isinstance(found, dict):
        msg = f"OSError: {path} is not a JSON object"
        raise ModelError(msg)
    return found


def load(model: str, processor_kwargs: dict[str, Any]) -> Model:
    """Read `model`, a directory; `processor_kwargs` are the server's (`--mm-processor-kwargs`).

    Raises:
        ModelError: it is no directory, or its config.json cannot be used.
    """
    directory = Path(model)
    if not (directory / "config.json").is_file():
        what = "has no config.json" if directory.is_dir() else "is not a local directory"
        msg = f"OSError: Can't load the configuration of '{model}': it {what}"
        raise ModelError(msg)
    config = _read(directory / "config.json")
    text = config.get("text_config", {})
    vision = config.get("vision_config", {})
    compiled = _read(directory / "rbln_config.json") if (directory / "rbln_config.json").is_file() else {}
    size = (
        _read(directory / "preprocessor_config.json").get("size", {})
        if (directory / "preprocessor_config.json").is_file()
        else {}
    )
    try:
        return Model(
            architecture=str(config.get("architectures", ["Qwen3VLForConditionalGeneration"])[0]),
            hidden=int(text.get("hidden_size", 64)),
            deepstack=len(vision.get("deepstack_visual_indexes", [0, 1, 2])),
            max_model_len=int(compiled.get("max_seq_len") or text.get("max_position_embeddings", 32768)),
            batch=int(compiled.get("batch_size") or 8),
            patch=int(vision.get("patch_size", 16)),
            merge=int(vision.get("spatial_merge_size", 2)),
            min_pixels=int(processor_kwargs.get("min_pixels", size.get("shortest_edge", 65536))),
            max_pixels=int(processor_kwargs.get("max_pixels", size.get("longest_edge", 16777216))),
        )
    except (TypeError, ValueError, IndexError, AttributeError) as e:
        msg = f"ValueError: {directory / 'config.json'}: {e}"
        raise ModelError(msg) from e


def shortened(model: Model, max_model_len: int) -> Model:
    """With `--max-model-len`."""
    return msgspec.structs.replace(model, max_model_len=max_model_len)

"""The visual encoder: an image to a tensor, and what the language model can read out of the tensor.

A real encoder's output says what is in the picture; this one's says which format, size and mean colour it
had, in the tensor's first bytes. So an answer that names them proves that these very bytes arrived.
"""

import math
from typing import NamedTuple

import msgspec

from eccon.sim.modeldir import Model

__all__ = ["Picture", "Tensor", "TensorError", "describe", "encode", "tokens"]

_MAGIC = b"eccon-sim\x00"


class Picture(msgspec.Struct, frozen=True):
    """What was found by decoding an image."""

    format: str
    width: int
    height: int
    colour: tuple[int, int, int]
    """Mean of red, green, blue, 0 to 255."""


class Tensor(NamedTuple):
    """Half-precision numbers: rows of visual tokens."""

    shape: tuple[int, ...]
    data: bytes


class TensorError(Exception):
    """An image that the processor refuses, or bytes that no encoder of ours wrote."""


def tokens(model: Model, width: int, height: int) -> int:
    """Visual tokens of an image after Qwen's resize: sides to multiples of 32, area within the limits.

    Raises:
        TensorError: longer than 200 times its other side, as the processor refuses it.
    """
    side = model.factor
    if max(width, height) / min(width, height) > 200:
        msg = f"absolute aspect ratio must be smaller than 200, got {max(width, height) / min(width, height)}"
        raise TensorError(msg)
    w, h = max(side, round(width / side) * side), max(side, round(height / side) * side)
    if w * h > model.max_pixels:
        shrink = math.sqrt(width * height / model.max_pixels)
        w = max(side, math.floor(width / shrink / side) * side)
        h = max(side, math.floor(height / shrink / side) * side)
    elif w * h < model.min_pixels:
        grow = math.sqrt(model.min_pixels / (width * height))
        w, h = math.ceil(width * grow / side) * side, math.ceil(height * grow / side) * side
    return (w // side) * (h // side)


def encode(model: Model, picture: Picture, rows: int) -> Tensor:
    """The tensor of one image, `[rows, hidden * (1 + deepstack)]`; the rest of it is its colour, repeated."""
    shape = (rows, model.width)
    size = shape[0] * shape[1] * 2
    said = msgspec.msgpack.encode(picture)
    header = _MAGIC + bytes([len(said)]) + said
    if len(header) > size:
        msg = f"hidden size {model.hidden}: a tensor of {size} bytes has no room for what it must say"
        raise TensorError(msg)
    filler = bytes(picture.colour)
    return Tensor(shape, header + (filler * (size // 3 + 1))[: size - len(header)])


def describe(tensor: Tensor) -> Picture:
    """What a tensor says.

    Raises:
        TensorError: these bytes are not an encoder's.
    """
    if not tensor.data.startswith(_MAGIC) or len(tensor.data) == len(_MAGIC):
        msg = "not a tensor of the stand-in's encoder"
        raise TensorError(msg)
    length = tensor.data[len(_MAGIC)]
    start = len(_MAGIC) + 1
    try:
        return msgspec.msgpack.decode(tensor.data[start : start + length], type=Picture)
    except msgspec.DecodeError as e:
        msg = "a tensor of the stand-in's encoder, damaged"
        raise TensorError(msg) from e

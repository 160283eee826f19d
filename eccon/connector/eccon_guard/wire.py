"""The connector's message, with what the guard adds. The vendor's decoder ignores keys that it does not know.

Keys are those of vllm-rbln 0.12; `ec_guard_crc32` is ours.
"""

import ctypes
import math
import zlib

import msgspec

__all__ = ["Message", "Tensor", "crc32_at", "decode", "encode", "fault"]

SIZES = {
    "torch.float16": 2,
    "torch.bfloat16": 2,
    "torch.float32": 4,
    "torch.int64": 8,
    "torch.int32": 4,
}
MAX_DIMENSIONS = 8


class Tensor(msgspec.Struct, frozen=True):
    """Where one item lies in its encoder's memory."""

    base_addr: int
    nbytes: int
    device_id: int
    shape: list[int]
    dtype_str: str


class Message(msgspec.Struct, frozen=True):
    """Encoder to PD: an item is there to be pulled."""

    engine_id: str
    mm_hash: str
    agent_metadata: bytes
    tensor: Tensor
    ack_host: str = ""
    ack_port: int = 0
    ec_guard_crc32: int | None = None


_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """As it goes over ZMQ."""
    return _encoder.encode(message)


def decode(raw: bytes) -> Message:
    """Raises msgspec.DecodeError (a ValidationError included) for what is none."""
    return _decoder.decode(raw)


def fault(tensor: Tensor, limit: int) -> str:
    """Why a tensor so described cannot be pulled; empty when it can. `limit` is in bytes."""
    size = SIZES.get(tensor.dtype_str)
    if size is None:
        return f"dtype {tensor.dtype_str[:40]!r} is not known"
    if not 0 < len(tensor.shape) <= MAX_DIMENSIONS or min(tensor.shape) <= 0:
        return "its shape is not one"
    if math.prod(tensor.shape) * size != tensor.nbytes:
        return "its shape and its size differ"
    if tensor.nbytes > limit:
        return f"{tensor.nbytes} bytes are more than guard_staging_bytes"
    if tensor.base_addr <= 0:
        return "its address is not one"
    return ""


def crc32_at(address: int, nbytes: int) -> int:
    """CRC-32 of memory of this process: 11 ms for 45 MB. The caller keeps it alive."""
    return zlib.crc32((ctypes.c_char * nbytes).from_address(address))

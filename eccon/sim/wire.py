"""The connector's messages: msgpack maps over ZMQ, with vllm-rbln 0.12's keys. Unknown keys are ignored."""

import msgspec

__all__ = ["Ack", "Metadata", "TensorInfo"]


class TensorInfo(msgspec.Struct, frozen=True):
    """Where one item's tensor lies in its encoder's memory."""

    base_addr: int
    nbytes: int
    device_id: int
    shape: list[int]
    dtype_str: str


class Metadata(msgspec.Struct, frozen=True):
    """Encoder to PD: an item is ready to be fetched."""

    engine_id: str
    mm_hash: str
    agent_metadata: bytes
    tensor: TensorInfo
    ack_host: str = ""
    ack_port: int = 0


class Ack(msgspec.Struct, frozen=True):
    """PD to encoder: fetched ("ok"), given up ("fail"), or a sign of life ("ping", without a hash)."""

    mm_hash: str
    engine_id: str
    status: str = "ok"
    consumer_engine_id: str = ""

"""Topology to argv and environment of each process. Pure: starts nothing, writes nothing."""

from eccon.launch.proxy import identity, pd_url, proxy
from eccon.launch.spec import EncoderSlot, NoRoomError, ProcessSpec, next_slot, slots
from eccon.launch.vllm import encoder, logging_config, pd

__all__ = [
    "EncoderSlot",
    "NoRoomError",
    "ProcessSpec",
    "encoder",
    "identity",
    "logging_config",
    "next_slot",
    "pd",
    "pd_url",
    "proxy",
    "slots",
]

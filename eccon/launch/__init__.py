"""Topology to argv and environment of each process. Pure: starts nothing, writes nothing."""

from eccon.config import Topology
from eccon.launch.proxy import identity, pd_url, proxy, public_url, sends_held_again
from eccon.launch.spec import EncoderSlot, NoRoomError, ProcessSpec, next_slot, slots
from eccon.launch.vllm import encoder, logging_config, pd
from eccon.paths import ClusterPaths

__all__ = [
    "EncoderSlot",
    "NoRoomError",
    "ProcessSpec",
    "encoder",
    "everything",
    "identity",
    "logging_config",
    "next_slot",
    "pd",
    "pd_url",
    "proxy",
    "public_url",
    "sends_held_again",
    "slots",
]


def everything(topology: Topology, paths: ClusterPaths) -> list[ProcessSpec]:
    """All processes of the topology: the PD, its encoders, the proxy."""
    encoders = [encoder(topology, paths, slot) for slot in slots(topology)]
    return [pd(topology, paths), *encoders, proxy(topology, paths, [e.url for e in encoders])]

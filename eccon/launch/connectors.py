"""What each EC connector has to be told on either side: names and defaults as in vLLM 0.30, vllm-rbln 0.12.

A connector ignores keys that it does not know, silently: those of the known ones are listed here, so that a
misspelt one can be refused.
"""

from typing import Any

import msgspec

from eccon.config import Topology
from eccon.launch import guard
from eccon.model import Role
from eccon.paths import ClusterPaths

__all__ = [
    "CAPACITY",
    "KEYS",
    "PULLS",
    "RBLN_CONNECTOR",
    "TTL_S",
    "Rooms",
    "environment",
    "listens",
    "rooms",
    "transfer",
    "unknown_keys",
]

RBLN_CONNECTOR = "RblnECNixlConnector"
RBLN_MODULE = "vllm_rbln.distributed.ec_transfer.ec_connector.rbln_ec_nixl_connector"
EXAMPLE, CPU, MOONCAKE = "ECExampleConnector", "ECCPUConnector", "ECMooncakeConnector"

TTL_S = 300
"""Seconds that an encoder keeps an item. The connector's 60 hardly hold eight images of 13.8 s each."""
CAPACITY = 256
"""Items that an encoder keeps (default 128); about 45 MB each at 8B."""
PULLS = 128
"""Items that the PD pulls in one step (default 32); what is beyond misses its prefill and ends the PD."""
CPU_BYTES = 4 * 2**30
"""ECCPUConnector's region in host memory, which it has no default for."""

KEYS: dict[str, frozenset[str]] = {
    RBLN_CONNECTOR: frozenset(
        {
            *("backends", "ack_queue_max"),
            *("pull_host", "pull_port", "metadata_queue_max", "max_concurrent_pulls", "ping_interval_s"),
            *("llm_host", "llm_pull_port", "ack_host", "ack_port"),
            *("producer_cache_capacity", "producer_cache_ttl_s", "dead_threshold_s"),
            *guard.KEYS,
        }
    ),
    EXAMPLE: frozenset({"shared_storage_path"}),
    CPU: frozenset({"ec_cpu_bytes", "ec_enable_nixl", "consumer_ack_timeout_s"}),
    MOONCAKE: frozenset({"mooncake_protocol", "control_timeout_s", "push_wait_timeout_s"}),
}
"""Keys of `ec_connector_extra_config` by connector."""


class Rooms(msgspec.Struct, frozen=True):
    """How much the RBLN connector takes, for the proxy to stay within."""

    pulls: int
    capacity: int
    ttl_s: float


def unknown_keys(kind: str, module_path: str, keys: "dict[str, Any]") -> list[str]:
    """Those of `keys` that the connector would ignore; none for a connector that is not known here."""
    known = KEYS.get(kind)
    return [] if known is None or module_path else [k for k in keys if k not in known]


def transfer(
    topology: Topology, paths: ClusterPaths, role: Role, index: int | None = None, *, vllm: str
) -> dict[str, Any]:
    """`--ec-transfer-config` of the PD, or of the encoder of that index, which is run by that command."""
    c = topology.connector
    config: dict[str, Any] = {
        "ec_connector": c.kind,
        "ec_role": "ec_consumer" if role is Role.PD else "ec_producer",
    }
    if c.module_path:
        config["ec_connector_module_path"] = c.module_path
    elif c.kind == RBLN_CONNECTOR and topology.launcher.profile == "safe":
        # vLLM loads it from here where the plugin that registers the name is not active.
        config["ec_connector_module_path"] = RBLN_MODULE
    if c.kind == MOONCAKE:
        config |= {"ec_ip": c.host, "ec_port": c.port}
    own: dict[str, Any] = {}
    if (chosen := guard.mode(topology, vllm)) != "off":
        config |= guard.transfer()
        name = "pd" if role is Role.PD else f"encoder-{index}"
        own = guard.told(topology, paths, chosen, name, TTL_S)
    return config | c.transfer | {"ec_connector_extra_config": own | _extra(topology, paths, role, index)}


def _extra(topology: Topology, paths: ClusterPaths, role: Role, index: int | None) -> dict[str, Any]:
    c = topology.connector
    if role is Role.PD:
        return _own(topology, paths, role) | c.extra | c.pd_extra
    overridden = topology.encoders.overridden(index or 0).connector_extra
    return _own(topology, paths, role) | c.extra | c.encoder_extra | overridden


def _own(topology: Topology, paths: ClusterPaths, role: Role) -> dict[str, Any]:
    c = topology.connector
    safe = topology.launcher.profile == "safe"
    match c.kind, role:
        case ("RblnECNixlConnector", Role.PD):
            pulls = {"max_concurrent_pulls": PULLS} if safe else {}
            return {"pull_host": c.host if safe else "0.0.0.0", "pull_port": c.port} | pulls
        case ("RblnECNixlConnector", _):
            held = {"producer_cache_ttl_s": TTL_S, "producer_cache_capacity": CAPACITY} if safe else {}
            return {"llm_host": _reach(c.host), "llm_pull_port": c.port} | held
        case ("ECExampleConnector", _):
            return {"shared_storage_path": c.shared_storage_path or str(paths.root / "ec-cache")}
        case ("ECCPUConnector", _):
            return {"ec_cpu_bytes": CPU_BYTES, "ec_enable_nixl": True}
    return {}


def environment(topology: Topology, role: Role, index: int | None = None) -> dict[str, str]:
    """Variables that the connector is told by."""
    c = topology.connector
    if c.kind != CPU:
        return {}
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if role is Role.ENCODER:
        port = c.port + (index or 0)
        variables |= {"VLLM_EC_SIDE_CHANNEL_HOST": c.host, "VLLM_EC_SIDE_CHANNEL_PORT": str(port)}
    return variables


def listens(topology: Topology, role: Role, index: int | None = None) -> tuple[int, ...]:
    """TCP ports that the connector binds in that process."""
    c = topology.connector
    if c.kind in {RBLN_CONNECTOR, MOONCAKE}:
        return (c.port,) if role is Role.PD else ()
    if c.kind == CPU:
        return () if role is Role.PD else (c.port + (index or 0),)
    return ()


def rooms(topology: Topology) -> Rooms | None:
    """What PD and encoders are told of the RBLN connector's bounds, its own defaults where nothing is said.

    The least of all encoders: the proxy has one bound for them.
    """
    c = topology.connector
    if c.kind != RBLN_CONNECTOR:
        return None
    safe = topology.launcher.profile == "safe"
    pulls = (c.extra | c.pd_extra).get("max_concurrent_pulls", PULLS if safe else 32)
    each = [{}, *(o.connector_extra for o in topology.encoders.override)]
    sides = [c.extra | c.encoder_extra | own for own in each]
    capacity = min(_number(s.get("producer_cache_capacity", CAPACITY if safe else 128)) for s in sides)
    ttl_s = min(_number(s.get("producer_cache_ttl_s", TTL_S if safe else 60)) for s in sides)
    return Rooms(max(1, int(_number(pulls))), int(capacity), ttl_s)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 1.0


def _reach(host: str) -> str:
    return "127.0.0.1" if host in {"0.0.0.0", "::", ""} else host

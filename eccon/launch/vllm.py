"""`vllm serve` for PD and encoders: the guide's flags, and with the safe profile the named differences."""

import json
import sys
from typing import Any

from eccon.config import Topology
from eccon.launch.spec import EncoderSlot, ProcessSpec, devices_shown
from eccon.launch.versions import device_variables
from eccon.model import Role
from eccon.paths import ClusterPaths

__all__ = ["CAPACITY", "PULLS", "RBLN_CONNECTOR", "TTL_S", "encoder", "logging_config", "pd"]

RBLN_CONNECTOR = "RblnECNixlConnector"
TTL_S = 300
"""Seconds that an encoder keeps an item. The connector's 60 hardly hold eight images of 13.8 s each."""
CAPACITY = 256
"""Items that an encoder keeps (default 128); about 45 MB each at 8B."""
PULLS = 128
"""Items that the PD pulls in one step (default 32); what is beyond misses its prefill and ends the PD."""

EC_LOGGER = "vllm_rbln.distributed.ec_transfer"


def pd(topology: Topology, paths: ClusterPaths) -> ProcessSpec:
    """The PD: listens for the encoders' metadata on the connector's port."""
    c = topology.connector
    extra: dict[str, Any]
    if topology.launcher.profile == "safe":
        extra = {"pull_host": c.host, "pull_port": c.port, "max_concurrent_pulls": PULLS}
    else:
        extra = {"pull_host": "0.0.0.0", "pull_port": c.port}
    return _serve(
        topology,
        paths,
        name="pd",
        role=Role.PD,
        host=topology.pd.host,
        port=topology.pd.port,
        devices=topology.pd.devices,
        transfer=_transfer(topology, "ec_consumer", extra),
        args=topology.pd.args,
        env=topology.pd.env,
        more_ports=(c.port,),
    )


def encoder(topology: Topology, paths: ClusterPaths, slot: EncoderSlot) -> ProcessSpec:
    """One encoder: pushes metadata to the PD."""
    c = topology.connector
    extra: dict[str, Any] = {"llm_host": c.host, "llm_pull_port": c.port}
    if topology.launcher.profile == "safe":
        extra |= {"producer_cache_ttl_s": TTL_S, "producer_cache_capacity": CAPACITY}
    return _serve(
        topology,
        paths,
        name=slot.name,
        role=Role.ENCODER,
        host=topology.encoders.host,
        port=slot.port,
        devices=[] if slot.device is None else [slot.device],
        transfer=_transfer(topology, "ec_producer", extra),
        args=topology.encoders.args,
        env=topology.encoders.env,
        more_ports=(),
    )


def _transfer(topology: Topology, role: str, extra: dict[str, Any]) -> dict[str, Any]:
    c = topology.connector
    config: dict[str, Any] = {"ec_connector": c.kind, "ec_role": role}
    if c.module_path:
        config["ec_connector_module_path"] = c.module_path
    config["ec_connector_extra_config"] = extra | c.extra
    return config


def _serve(
    topology: Topology,
    paths: ClusterPaths,
    *,
    name: str,
    role: Role,
    host: str,
    port: int,
    devices: list[int],
    transfer: dict[str, Any],
    args: list[str],
    env: dict[str, str],
    more_ports: tuple[int, ...],
) -> ProcessSpec:
    launcher = topology.launcher
    command = [launcher.vllm] if launcher.kind == "vllm" else [sys.executable, "-m", "eccon.sim"]
    argv = [*command, "serve", topology.model.path, "--port", str(port)]
    if launcher.profile == "safe":
        argv += ["--host", host]
    if topology.model.served_name:
        argv += ["--served-model-name", topology.model.served_name]
    if topology.model.max_pixels is not None:
        argv += ["--mm-processor-kwargs", json.dumps({"max_pixels": topology.model.max_pixels})]
    argv += ["--ec-transfer-config", json.dumps(transfer), *args]

    variables: dict[str, str] = {}
    unset: tuple[str, ...] = ()
    if topology.devices.kind != "none":
        name_of_list, unset = device_variables(topology)
        variables[name_of_list] = ",".join(map(str, devices))
    if launcher.profile == "safe":
        variables["VLLM_LOGGING_CONFIG_PATH"] = str(paths.logging_config)
    reach = "127.0.0.1" if host in {"0.0.0.0", "::", ""} else host
    return ProcessSpec(
        name=name,
        role=role,
        argv=tuple(argv),
        env=variables | topology.env | env,
        unset=unset,
        cwd=str(topology.directory),
        host=reach,
        port=port,
        url=f"http://{reach}:{port}",
        device=devices_shown(devices),
        ports=(port, *more_ports),
    )


def logging_config() -> dict[str, Any]:
    """vLLM's logging with the EC connector's logger alone at DEBUG, its times to the microsecond.

    Handed over by VLLM_LOGGING_CONFIG_PATH it reaches API server, EngineCore and Worker. uvicorn takes it
    too: without its three loggers, "Application startup complete" and the access log vanish
    (seen with vLLM 0.30).
    """

    def logger(handler: str, level: str) -> dict[str, Any]:
        return {"handlers": [handler], "level": level, "propagate": False}

    def handler(formatter: str, level: str) -> dict[str, Any]:
        stream = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}
        return {**stream, "formatter": formatter, "level": level}

    exact = "%(created).6f %(levelname)s %(process)d %(threadName)s %(name)s:%(lineno)d %(message)s"
    plain = "%(levelname)s %(asctime)s [%(name)s:%(lineno)d] %(message)s"
    ordinary = ("vllm", "vllm_rbln", "uvicorn", "uvicorn.error", "uvicorn.access")
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"exact": {"format": exact}, "plain": {"format": plain, "datefmt": "%m-%d %H:%M:%S"}},
        "handlers": {"exact": handler("exact", "DEBUG"), "plain": handler("plain", "INFO")},
        "loggers": {
            **{name: logger("plain", "INFO") for name in ordinary},
            EC_LOGGER: logger("exact", "DEBUG"),
        },
    }

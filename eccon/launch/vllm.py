"""`vllm serve` for PD and encoders: the guide's flags, and with the safe profile the named differences."""

import json
import sys
from typing import Any

import msgspec

from eccon.config import Topology
from eccon.launch import connectors, guard
from eccon.launch.keys import serving_key
from eccon.launch.spec import EncoderSlot, ProcessSpec, devices_shown, loopback_for, numbers_of, split_url
from eccon.launch.versions import device_variables, installed
from eccon.launch.versions import vllm as release_of
from eccon.model import Role
from eccon.paths import ClusterPaths

__all__ = ["encoder", "logging_config", "pd"]

EC_LOGGER = "vllm_rbln.distributed.ec_transfer"


class _Server(msgspec.Struct, frozen=True, kw_only=True):
    """What PD and encoders differ in."""

    name: str
    role: Role
    index: int | None = None
    vllm: str
    host: str
    port: int
    devices: list[int]
    args: list[str]
    env: dict[str, str]
    cpus: str


def pd(topology: Topology, paths: ClusterPaths) -> ProcessSpec:
    """The PD: listens for the encoders' metadata on the connector's port."""
    own = topology.pd
    if own.external:
        return _external("pd", Role.PD, own.url, topology)
    server = _Server(
        name="pd",
        role=Role.PD,
        vllm=own.vllm or topology.launcher.vllm,
        host=own.host,
        port=own.port,
        devices=own.devices,
        args=own.args,
        env=own.env,
        cpus=own.cpus,
    )
    return _serve(topology, paths, server)


def encoder(topology: Topology, paths: ClusterPaths, slot: EncoderSlot) -> ProcessSpec:
    """One encoder: pushes metadata to the PD."""
    common, own = topology.encoders, topology.encoders.overridden(slot.index)
    if own.external:
        return _external(slot.name, Role.ENCODER, own.url, topology)
    server = _Server(
        name=slot.name,
        role=Role.ENCODER,
        index=slot.index,
        vllm=own.vllm or common.vllm or topology.launcher.vllm,
        host=common.host if own.host is None else own.host,
        port=slot.port,
        devices=[] if slot.device is None else [slot.device],
        args=[*common.args, *own.args],
        env=common.env | own.env,
        cpus=own.cpus or (common.cpus[slot.index] if slot.index < len(common.cpus) else ""),
    )
    return _serve(topology, paths, server)


def _external(name: str, role: Role, url: str, topology: Topology) -> ProcessSpec:
    host, port = split_url(url)
    key = serving_key(topology)
    return ProcessSpec(
        name=name,
        role=role,
        argv=(),
        env={"VLLM_API_KEY": key} if key else {},
        cwd=str(topology.directory),
        host=host,
        port=port,
        url=url.rstrip("/"),
        ports=(),
        external=True,
    )


def _serve(topology: Topology, paths: ClusterPaths, server: _Server) -> ProcessSpec:
    launcher, model = topology.launcher, topology.model
    safe = launcher.profile == "safe"
    command = [server.vllm] if launcher.kind == "vllm" else [sys.executable, "-m", "eccon.sim"]
    argv = [*command, "serve", model.path, "--port", str(server.port)]
    if safe:
        argv += ["--host", server.host]
    if model.served_name:
        argv += ["--served-model-name", model.served_name]
    if model.max_pixels is not None:
        argv += ["--mm-processor-kwargs", json.dumps({"max_pixels": model.max_pixels})]
    transfer = connectors.transfer(topology, paths, server.role, server.index, vllm=server.vllm)
    argv += ["--ec-transfer-config", json.dumps(transfer), *server.args]

    variables = connectors.environment(topology, server.role, server.index)
    unset: tuple[str, ...] = ()
    if topology.devices.kind != "none":
        name_of_list, unset = device_variables(topology, server.vllm)
        variables[name_of_list] = ",".join(map(str, server.devices))
    if safe:
        known = release_of(installed(server.vllm, "vllm", topology.directory))
        variables["VLLM_LOGGING_CONFIG_PATH"] = str(paths.logging_config(named=known.names_records))
    if model.api_key_file:
        variables["VLLM_API_KEY"] = serving_key(topology)
    reach = loopback_for(server.host if safe else "")
    return ProcessSpec(
        name=server.name,
        role=server.role,
        argv=tuple(argv),
        env=variables | topology.env | server.env | _guard(topology, server),
        unset=unset,
        cwd=str(topology.directory),
        host=reach,
        port=server.port,
        url=f"http://{reach}:{server.port}",
        device=devices_shown(server.devices),
        cpus=numbers_of(server.cpus),
        ports=(server.port, *connectors.listens(topology, server.role, server.index)),
    )


def _guard(topology: Topology, server: _Server) -> dict[str, str]:
    if guard.mode(topology, server.vllm) == "off":
        return {}
    return guard.environment(topology, server.env)


def logging_config(*, named: bool = False) -> dict[str, Any]:
    """vLLM's logging with the EC connector's logger alone at DEBUG, its times to the microsecond.

    Handed over by VLLM_LOGGING_CONFIG_PATH it reaches API server, EngineCore and Worker. uvicorn takes it
    too: without its three loggers, "Application startup complete" and the access log vanish
    (seen with vLLM 0.30).

    Args:
        named: lines begin with `(name pid=N) `, which vLLM 0.32 leaves to the format.
    """

    def logger(handler: str, level: str) -> dict[str, Any]:
        return {"handlers": [handler], "level": level, "propagate": False}

    def handler(formatter: str, level: str) -> dict[str, Any]:
        stream = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}
        return {**stream, "formatter": formatter, "level": level}

    exact = "%(created).6f %(levelname)s %(process)d %(threadName)s %(name)s:%(lineno)d %(message)s"
    plain = "%(levelname)s %(asctime)s [%(name)s:%(lineno)d] %(message)s"
    ordinary = ("vllm", "vllm_rbln", "uvicorn", "uvicorn.error", "uvicorn.access")
    formatters: dict[str, dict[str, Any]] = {
        "exact": {"format": exact},
        "plain": {"format": plain, "datefmt": "%m-%d %H:%M:%S"},
    }
    if named:
        formatters = {name: _named(formatter) for name, formatter in formatters.items()}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": formatters,
        "handlers": {"exact": handler("exact", "DEBUG"), "plain": handler("plain", "INFO")},
        "loggers": {
            **{name: logger("plain", "INFO") for name in ordinary},
            EC_LOGGER: logger("exact", "DEBUG"),
        },
    }


def _named(formatter: dict[str, Any]) -> dict[str, Any]:
    """A line of a record that vLLM has not named, if there is any, is not lost."""
    text = "(%(vllm_process_name)s pid=%(process)d) " + formatter["format"]
    rest = {k: v for k, v in formatter.items() if k != "format"}
    return {"()": "logging.Formatter", "fmt": text, "defaults": {"vllm_process_name": "vLLM"}, **rest}

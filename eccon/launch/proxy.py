"""eccon-proxy's command line."""

import sys
from collections.abc import Sequence

from eccon.config import Scalar, Topology
from eccon.launch import connectors
from eccon.launch.keys import serving_key
from eccon.launch.spec import ProcessSpec, loopback_for, numbers_of
from eccon.model import Role
from eccon.paths import ClusterPaths

__all__ = ["identity", "pd_url", "proxy", "public_url", "sends_held_again"]


def proxy(topology: Topology, paths: ClusterPaths, encoder_urls: Sequence[str]) -> ProcessSpec:
    """The proxy, with the encoders that are in the cluster now; later ones join by its admin API."""
    p = topology.proxy
    keys = ("--api-key-file", str(topology.directory / p.api_key_file)) if p.api_key_file else ()
    argv = (
        *(sys.executable, "-m", "eccon_proxy"),
        *("--host", p.host, "--port", str(p.port)),
        *("--encode-servers-urls", ",".join(encoder_urls)),
        *("--decode-servers-urls", pd_url(topology)),
        *("--connector", topology.connector.kind),
        *_flags(_rooms(topology) | p.settings),
        *keys,
        *("--admin", f"unix:{paths.admin_socket}"),
        *p.args,
    )
    key = serving_key(topology)
    reach = loopback_for(p.host)
    return ProcessSpec(
        name="proxy",
        role=Role.PROXY,
        argv=argv,
        env=({"ECCON_PROXY_UPSTREAM_API_KEY": key} if key else {}) | topology.env | p.env,
        cwd=str(topology.directory),
        host=reach,
        port=p.port,
        url=f"{_scheme(topology)}://{reach}:{p.port}",
        ports=(p.port,),
        cpus=numbers_of(p.cpus),
    )


def public_url(topology: Topology) -> str:
    """What clients are told."""
    return f"{_scheme(topology)}://{topology.proxy.host}:{topology.proxy.port}"


def _scheme(topology: Topology) -> str:
    p = topology.proxy
    flag = any(word.partition("=")[0] == "--ssl-certfile" for word in p.args)
    return "https" if flag or p.settings.get("ssl_certfile") else "http"


def pd_url(topology: Topology) -> str:
    """Where the proxy finds the PD."""
    if topology.pd.external:
        return topology.pd.url.rstrip("/")
    # The guide's flags bind every address.
    host = topology.pd.host if topology.launcher.profile == "safe" else ""
    return f"http://{loopback_for(host)}:{topology.pd.port}"


def identity(topology: Topology) -> str:
    """The proxy's `--identity`: whether what it names an image by is fresh for each attempt."""
    return _said(topology, "identity", "attempt")


def sends_held_again(topology: Topology) -> bool:
    """Whether a PD gets every image that it is asked about, though an encoder may hold it from before.

    With fresh names no encoder holds it; a guarded one sends it again, and the proxy insists on that.
    """
    named = identity(topology)
    return named == "attempt" or (named == "content" and _said(topology, "guard", "auto") == "on")


def _said(topology: Topology, name: str, default: str) -> str:
    args = topology.proxy.args
    for i, word in enumerate(args):
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
        if word == f"--{name}" and i + 1 < len(args):
            return args[i + 1]
    return str(topology.proxy.settings.get(name, default))


def _rooms(topology: Topology) -> dict[str, Scalar]:
    """What the connector was given, less what keeps the proxy clear of its edge."""
    rooms = connectors.rooms(topology)
    if rooms is None:
        return {}
    found: dict[str, Scalar] = {
        "pd_items": rooms.pulls,
        "staged_items": max(1, round(rooms.capacity * 0.75)),
        "staged_age": rooms.ttl_s * 0.75,
    }
    own: dict[str, Scalar] = {"pd_items": 32, "staged_items": 96, "staged_age": 45.0}
    return found if found != own else {}


def _flags(settings: dict[str, Scalar]) -> list[str]:
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", ",".join(value)]
        else:
            flags += [f"--{flag}", f"{value:g}" if isinstance(value, float) else str(value)]
    return flags

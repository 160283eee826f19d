"""eccon-proxy's command line."""

import sys
from collections.abc import Sequence

from eccon.config import Topology
from eccon.launch.spec import ProcessSpec
from eccon.launch.vllm import CAPACITY, PULLS, RBLN_CONNECTOR, TTL_S
from eccon.model import Role
from eccon.paths import ClusterPaths

__all__ = ["proxy"]


def proxy(topology: Topology, paths: ClusterPaths, encoder_urls: Sequence[str]) -> ProcessSpec:
    """The proxy, with the encoders that are in the cluster now; later ones join by its admin API."""
    p = topology.proxy
    rooms: tuple[str, ...] = ()
    if topology.launcher.profile == "safe" and topology.connector.kind == RBLN_CONNECTOR:
        # What the connector was given, less what keeps the proxy clear of its edge.
        staged_items, staged_age_s = round(CAPACITY * 0.75), round(TTL_S * 0.75)
        rooms = (
            *("--pd-items", str(PULLS)),
            *("--staged-items", str(staged_items), "--staged-age", str(staged_age_s)),
        )
    pd_host = "127.0.0.1" if topology.pd.host in {"0.0.0.0", "::", ""} else topology.pd.host
    argv = (
        *(sys.executable, "-m", "eccon_proxy"),
        *("--host", p.host, "--port", str(p.port)),
        *("--encode-servers-urls", ",".join(encoder_urls)),
        *("--decode-servers-urls", f"http://{pd_host}:{topology.pd.port}"),
        *("--connector", topology.connector.kind),
        *rooms,
        *("--admin", f"unix:{paths.admin_socket}"),
        *p.args,
    )
    reach = "127.0.0.1" if p.host in {"0.0.0.0", "::", ""} else p.host
    return ProcessSpec(
        name="proxy",
        role=Role.PROXY,
        argv=argv,
        env=topology.env | p.env,
        cwd=str(topology.directory),
        host=reach,
        port=p.port,
        url=f"http://{reach}:{p.port}",
        ports=(p.port,),
    )

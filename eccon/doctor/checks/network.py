"""Ports: free, not shared, not open to more than they should be."""

import ipaddress
from collections.abc import Iterator

from eccon.doctor.evidence import Evidence
from eccon.doctor.finding import Finding, bad, good, note, warn
from eccon.launch.connectors import RBLN_CONNECTOR
from eccon.launch.keys import serving_key
from eccon.model import Role

__all__ = ["ephemeral", "exposed", "ports_free", "pull_port", "twins"]


def ports_free(e: Evidence) -> Iterator[Finding]:
    """Nobody else listens where this cluster is to."""
    held = [p for p in e.ports if p.holder]
    for p in held:
        advice = "end it, or give the process another port in eccon.toml"
        yield bad("port", f"{p.process}: port {p.port} is taken", p.holder, advice=advice)
    if not held:
        whose = "this cluster's own" if e.running else "free"
        count = sum(len(s.ports) for s in e.specs)
        yield good("port", f"all {count} ports are {whose}")


def twins(e: Evidence) -> Iterator[Finding]:
    """With several API servers vLLM binds with SO_REUSEPORT: two on one port share its requests."""
    for p in e.ports:
        if p.listeners > 1:
            advice = f"`ss -ltnp 'sport = :{p.port}'` names them; end the one that is not this cluster's"
            text = f"{p.listeners} processes listen on port {p.port} and share its requests"
            yield bad("port-twins", text, p.process, advice=advice)


def pull_port(e: Evidence) -> Iterator[Finding]:
    """Where encoders send to must be where the PD listens; and a bad message there ends the PD."""
    t = e.topology
    if t.connector.kind != RBLN_CONNECTOR or t.pd.external:
        return
    pd = next((s for s in e.specs if s.role is Role.PD), None)
    host = t.connector.host if t.launcher.profile == "safe" else "0.0.0.0"
    where = f"{host}:{t.connector.port}"
    if pd is not None and t.connector.port not in pd.ports:
        yield note("pull-port", f"the PD does not listen on {where} itself")
    if _is_loopback(host):
        yield good("pull-port", f"the PD listens for its encoders on {where}, this host only")
        return
    advice = "set connector.host to an address that only the encoders' network reaches, and guard it"
    text = f"the PD listens for its encoders on {where}: one bad message there ends it"
    yield warn("pull-port", text, advice=advice)


def exposed(e: Evidence) -> Iterator[Finding]:
    """Servers that clients can reach past the proxy; each such request may end the PD."""
    t = e.topology
    guide = t.launcher.profile == "guide"
    open_hosts = {
        s.name
        for s in e.specs
        if s.role is not Role.PROXY and not s.external and (guide or not _is_loopback(_bound(e, s.name)))
    }
    if not open_hosts:
        yield good("exposed", "PD and encoders listen on this host only")
    elif serving_key(t):
        yield good("exposed", f"{len(open_hosts)} servers listen beyond this host, and ask for a key")
    else:
        advice = "bind them to 127.0.0.1, or set model.api_key_file: an image past the proxy ends the PD"
        names = ", ".join(sorted(open_hosts))
        yield warn(
            "exposed", f"{len(open_hosts)} servers can be reached past the proxy", names, advice=advice
        )


def _bound(e: Evidence, name: str) -> str:
    if name == "pd":
        return e.topology.pd.host
    own = e.topology.encoders.overridden(int(name.rpartition("-")[2])).host
    return e.topology.encoders.host if own is None else own


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def ephemeral(e: Evidence) -> Iterator[Finding]:
    """vLLM binds its port long before it listens: the system may give an ephemeral one away meanwhile."""
    low, high = e.host.ephemeral
    inside = [p for s in e.specs for p in s.ports if low <= p <= high]
    if inside:
        advice = f"use ports below {low}"
        text = f"port {inside[0]} may be given to any client of this host while a server loads"
        yield warn("port-ephemeral", text, f"ephemeral ports are {low}-{high}", advice=advice)

"""What load balancers and people ask: is the process there, is the cluster ready. From memory, at once."""

from typing import Literal

from eccon_proxy.core import Core

__all__ = ["health", "ready"]


def _encoders(core: Core) -> Literal["empty", "healthy", "unhealthy"]:
    if not core.encoders:
        return "empty"
    return "healthy" if all(e.open for e in core.encoders.values()) else "unhealthy"


def health(core: Core) -> tuple[int, dict[str, object]]:
    """Status and body of `/health`: the keys of the guide's proxy, and `status`."""
    encoders = _encoders(core)
    pds = [pd.state == "ready" for pd in core.pds]
    usable = any(e.open for e in core.encoders.values()) or encoders == "empty"
    if core.draining or not any(pds) or not usable:
        status = "unavailable"
    else:
        status = "ok" if all(pds) and encoders == "healthy" else "degraded"
    body: dict[str, object] = {
        "proxy": "draining" if core.draining else "healthy",
        "encode_cluster": encoders,
        "decode_cluster": "healthy" if all(pds) else "unhealthy",
        "status": status,
    }
    return 503 if status == "unavailable" else 200, body


def ready(core: Core) -> tuple[int, dict[str, object]]:
    """Status and body of `/readyz`: whether requests with media can be served."""
    reasons = []
    if core.draining:
        reasons.append("draining")
    if not any(pd.state == "ready" for pd in core.pds):
        reasons.append("no PD is ready")
    if not any(e.open for e in core.encoders.values()):
        reasons.append("no encoder is ready")
    return 503 if reasons else 200, {"ready": not reasons, "reasons": reasons}

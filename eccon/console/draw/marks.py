"""A mark, a word and a tone for every state: colour is never the only sign."""

from eccon.model import State
from eccon_proxy.schema import Trace

__all__ = ["HEALTH", "STATES", "severity", "status"]

STATES: dict[State, tuple[str, str]] = {
    State.STOPPED: ("○", "dim"),
    State.WAITING: ("◌", "dim"),
    State.STARTING: ("◔", "busy"),
    State.LOADING: ("◐", "busy"),
    State.READY: ("●", "ok"),
    State.STALLED: ("▲", "warn"),
    State.DRAINING: ("◒", "busy"),
    State.STOPPING: ("◑", "busy"),
    State.BACKOFF: ("↻", "warn"),
    State.FAILED: ("✗", "bad"),
    State.BLOCKED: ("■", "bad"),
}

HEALTH: dict[str, tuple[str, str]] = {
    "ok": ("●", "ok"),
    "degraded": ("▲", "warn"),
    "unavailable": ("✗", "bad"),
    "stopped": ("○", "dim"),
    "starting": ("◐", "busy"),
}


def status(trace: Trace) -> tuple[str, str, str]:
    """Mark, status word and tone of a request."""
    if trace.status == 0:
        return "◐", "…", "busy"
    if trace.status == 499:
        return "○", "499", "dim"
    if trace.outcome in ("ok", "") and trace.status < 400:
        return "●", str(trace.status), "ok"
    return ("▲", str(trace.status), "warn") if trace.status in (429, 503) else ("✗", str(trace.status), "bad")


def severity(word: str) -> tuple[str, str]:
    """Mark and tone of an event's or an alarm's severity."""
    return {
        "critical": ("✗", "bad"),
        "error": ("✗", "bad"),
        "warning": ("▲", "warn"),
    }.get(word, ("·", "dim"))

"""A mark, a word and a tone for every state: colour is never the only sign."""

from eccon.model import Process, State
from eccon_proxy.schema import Trace

__all__ = ["HEALTH", "STATES", "presence", "serves", "severity", "status"]

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


def serves(process: Process) -> bool:
    """Whether it is ready, and the proxy (where it has a say) agrees."""
    return process.state is State.READY and (process.encoder is None or process.encoder.state == "ready")


def presence(process: Process) -> tuple[str, str, str]:
    """Mark, word and tone of a process's state: its own, or the proxy's when that one has lost faith."""
    if process.state is State.READY and process.encoder is not None and process.encoder.state != "ready":
        word = process.encoder.state
        busy = word in ("probing", "draining", "drained")
        return ("◒", word, "busy") if busy else ("▲", word, "warn")
    mark, tone = STATES[process.state]
    return mark, process.state.value, tone


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

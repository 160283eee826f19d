"""The line on top: which cluster, how it is and why, and the figures that matter most."""

from eccon.console.draw import figures
from eccon.console.draw.marks import HEALTH, serves
from eccon.console.draw.text import Line, clean, fit, fit_line, line_width
from eccon.model import ClusterState, Role

__all__ = ["header", "headers", "unknown"]


def unknown(state: ClusterState) -> bool:
    """Whether nothing has been heard of the cluster yet."""
    return not state.seq and not state.processes


def _health(state: ClusterState, lost: str) -> Line:
    if lost:
        return [("✗ ", "bad"), (lost, "bad")]
    if unknown(state):
        return [("◌ connecting", "topdim")]
    info = state.cluster
    mark, tone = HEALTH[info.health]
    line: Line = [(f"{mark} ", tone), (info.health, tone)]
    if info.reason:
        line.append((f": {clean(info.reason)}", tone))
    return line


def _figures(state: ClusterState) -> list[str]:
    """Most important first."""
    if unknown(state):
        return []
    info = state.cluster
    encoders = [p for p in state.processes if p.role is Role.ENCODER]
    ready = sum(serves(p) for p in encoders)
    out = [f"{ready}/{len(encoders)} encoders", f"{figures.rate(info.requests_per_s)} req/s"]
    if info.ttft is not None:
        out.append(f"ttft {figures.pair_ms(info.ttft.p50, info.ttft.p99)}")
    if info.transfer is not None:
        out.append(f"xfer {figures.pair_ms(info.transfer.total.p50, info.transfer.total.p99)}")
    return out


def _spread(left: Line, right: Line, width: int) -> Line:
    room = width - line_width(right) - 1
    return fit_line([*fit_line(left, max(room, 0), "top"), (" ", "top"), *right], width, "top")


def header(state: ClusterState, width: int, now: float, lost: str = "", flag: str = "") -> Line:
    """Everything on one line; what does not fit is dropped from the least important on."""
    clock = figures.clock(now)
    left: Line = [(" eccon ", "brand"), (" ", "top"), (clean(state.cluster.name), "title"), ("  ", "top")]
    if flag:
        left += [(flag, "warn"), ("  ", "top")]
    left += _health(state, lost)
    shown: list[str] = []
    for text in _figures(state):
        if line_width(left) + sum(len(t) + 3 for t in (*shown, text)) + len(clock) + 3 > width:
            break
        shown.append(text)
    right = "   ".join((*shown, f"{clock} "))
    room = width - line_width(left) - len(right) - 2
    model = clean(state.cluster.model)
    if model and room >= len(model) + 2:
        left[3:3] = [(f"  {model}", "top")]
        room -= len(model) + 2
    url = clean(state.cluster.public_url)
    if url and room >= len(url) + 2:
        left[4:4] = [(f"  {url}", "topdim")]
    return _spread(left, [(right, "top")], width)


def headers(state: ClusterState, width: int, now: float, lost: str = "", flag: str = "") -> list[Line]:
    """Two lines for a roomy terminal: identity above, health and figures below."""
    info = state.cluster
    above: Line = [
        (" eccon ", "brand"),
        (" ", "top"),
        (clean(info.name), "title"),
        *([("  ", "top"), (flag, "warn")] if flag else []),  # not what is cut off where room is short
        (f"  {clean(info.model)}", "top"),
        (f"  {clean(info.public_url)}", "topdim"),
    ]
    below: Line = [(" ", "top"), *_health(state, lost)]
    shown = ""
    for text in _figures(state):
        longer = f"{shown}   {text}" if shown else text
        if len(longer) + 20 > width:
            break
        shown = longer
    return [
        _spread(above, [(f"{figures.clock(now)} ", "top")], width),
        _spread(below, [(f"{fit(shown, len(shown))} ", "top")], width),
    ]

"""The live diagram and the charts beside it."""

from collections.abc import Sequence
from functools import lru_cache

from eccon.console.draw import figures
from eccon.console.draw.marks import presence, serves
from eccon.console.draw.text import Line, Part, fit, fit_line
from eccon.console.history import BUCKET_S, History
from eccon.model import ClusterState, Process, Role, Trace

__all__ = ["WINDOWS", "chart", "fanout", "flow", "token_rate", "window_step"]

WINDOWS = (60, 300, 1800)
"""Seconds that a chart can span."""
LABEL = 7
"""Cells of a chart's scale."""


def window_step(window: int, width: int) -> int:
    """Buckets a cell so that `width` cells span `window` seconds."""
    return max(1, round(window / BUCKET_S / max(width, 1)))


def _node(processes: Sequence[Process], word: str) -> Line:
    if not processes:
        return [("○ ", "dim"), (word, "dim")]
    worst = min(processes, key=lambda p: (serves(p), p.name))
    mark, _, tone = presence(worst)
    return [(f"{mark} ", tone), (word, "text")]


def flow(state: ClusterState, width: int, tokens_per_s: float = 0.0) -> list[Line]:
    """Three lines: requests go right, the answer comes back."""
    info = state.cluster
    encoders = [p for p in state.processes if p.role is Role.ENCODER]
    ready = sum(serves(p) for p in encoders)
    inflight = sum(p.encoder.inflight for p in encoders if p.encoder)
    staged = sum(p.encoder.staged for p in encoders if p.encoder)
    pd = [p for p in state.processes if p.role is Role.PD]
    proxy = [p for p in state.processes if p.role is Role.PROXY]
    there: Line = [
        ("clients ", "dim"),
        (f"─{figures.rate(info.requests_per_s):>4}/s▶ ", "accent"),
        *_node(proxy, "proxy"),
        (f" ─{figures.rate(info.items_per_s):>4} img/s▶ ", "accent"),
        *_node(encoders, f"{ready}/{len(encoders)} encoders"),
    ]
    middle: Line = [
        (f"{info.inflight:>5} in flight", "text" if info.inflight else "dim"),
        (" " * 15, "text"),
        (f"{inflight:>4} encoding {staged:>3} staged", "text" if inflight + staged else "dim"),
    ]
    moved = "" if info.transfer is None else figures.pair_ms(info.transfer.total.p50, info.transfer.total.p99)
    back: Line = [
        ("        ", "dim"),
        (f"◀─ {tokens_per_s:>4.0f} tok/s ── ", "accent"),
        *_node(pd, "PD"),
        (f" ◀── {moved or 'no transfer yet'} ──╯", "accent" if moved else "dim"),
    ]
    return [fit_line(line, width) for line in (there, middle, back)]


def chart(
    history: History, keys: Sequence[tuple[str, str]], width: int, height: int, window: int, unit: str = ""
) -> list[Line]:
    """`height` lines of blocks for one or two series (the later ones behind, dim), and its scale."""
    cells = max(width - LABEL, 4)
    step = window_step(window, cells)
    series = tuple((tuple(history.get(key).last(cells, step)), tone) for key, tone in keys)
    return [list(line) for line in _blocks(series, cells, height, unit)]


@lru_cache(64)
def _blocks(
    series: tuple[tuple[tuple[float, ...], str], ...], cells: int, height: int, unit: str
) -> tuple[tuple[Part, ...], ...]:
    """The lines of a chart of these points; they are mostly those of the second before."""
    top = _nice(max((max(values, default=0.0) for values, _ in series), default=0.0))
    lines = []
    for y in range(height):
        text = (
            f"{_short(top, unit):>{LABEL - 1}} "
            if y == 0
            else f"{'0':>{LABEL - 1}} "
            if y == height - 1
            else " " * LABEL
        )
        line: Line = [(text if height > 1 else f"{_short(top, unit):>{LABEL - 1}} ", "dim")]
        low = (height - 1 - y) / height * top
        for x in range(cells):
            line.append(_cell(series, x, cells, low, top / height if top else 0.0))
        lines.append(tuple(_merged(line)))
    return tuple(lines)


def _cell(
    series: Sequence[tuple[Sequence[float], str]], x: int, cells: int, low: float, unit: float
) -> tuple[str, str]:
    for values, tone in series:
        i = len(values) - cells + x
        value = values[i] if i >= 0 else 0.0
        if value > low and unit:
            return figures.BLOCKS[max(1, min(8, round((value - low) / unit * 8)))], tone
    return " ", "text"


def _merged(line: Line) -> Line:
    out: Line = []
    for text, tone in line:
        if out and out[-1][1] == tone:
            out[-1] = (out[-1][0] + text, tone)
        else:
            out.append((text, tone))
    return out


def _nice(top: float) -> float:
    """The next of 1, 2, 5 times a power of ten: a scale that seldom changes."""
    if top <= 0:
        return 0.0
    base = 1.0
    while base > top:
        base /= 10
    while base * 10 <= top:
        base *= 10
    return next(base * k for k in (1, 2, 5, 10) if base * k >= top)


def _short(value: float, unit: str) -> str:
    if unit == "ms" and value >= 1000:
        return f"{value / 1000:g} s"
    return f"{value:g} {unit}".rstrip() if value < 10_000 else f"{value / 1000:g}k {unit}".rstrip()


def fanout(state: ClusterState, history: History, width: int, height: int, window: int) -> list[Line]:
    """A small chart of items a second for each encoder, as many as fit."""
    encoders = [p for p in state.processes if p.role is Role.ENCODER]
    if not encoders:
        return [fit_line([("no encoder", "dim")], width)] + [fit_line([], width)] * (height - 1)
    per_line = max(1, -(-len(encoders) // max(height, 1)))
    while per_line > 1 and width // per_line < 12:
        per_line -= 1
    cell = width // per_line
    cells = max(4, min(20, cell - 9))
    step = window_step(window, cells)
    points = {p.name: history.get(f"items:{p.name}").last(cells, step) for p in encoders}
    top = _nice(max((max(v, default=0.0) for v in points.values()), default=0.0))
    lines: list[Line] = []
    for y in range(height):
        line: Line = []
        for p in encoders[y * per_line : (y + 1) * per_line]:
            short = p.name.rpartition("-")[2] if "-" in p.name else p.name
            mark, _, tone = presence(p)
            now = figures.rate(history.rate(p.name))
            line += [(f"{mark}", tone), (f"{fit(short, 2, True)} ", "dim")]
            line += [(figures.spark(points[p.name], cells, top or None), "bar"), (f"{now:>4} ", "text")]
        lines.append(fit_line(line, width))
    hidden = len(encoders) - per_line * height
    if hidden > 0 and lines:
        lines[-1] = fit_line([*lines[-1][:-1], (f" +{hidden}", "dim")], width)
    return lines


def token_rate(traces: Sequence[Trace], now: float, over_s: float = 10.0) -> float:
    """Tokens a second of the answers that ended in the last seconds."""
    tokens = 0
    for trace in reversed(traces):
        if trace.total_s is None or trace.completion_tokens is None:
            continue
        if trace.started_at + trace.total_s >= now - over_s:
            tokens += trace.completion_tokens
    return tokens / over_s

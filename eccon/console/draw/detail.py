"""All that is known of one process, as lines."""

import shlex

from eccon.console.draw import figures, flow, processes
from eccon.console.draw.marks import presence
from eccon.console.draw.text import Line, cell_len, clean, fit, wrap
from eccon.console.history import History
from eccon.model import ClusterState, Process, Quantiles, Role

__all__ = ["detail"]


def _field(label: str, value: str, tone: str = "text") -> Line:
    return [(f" {label:<12} ", "dim"), (value, tone)]


def _folded(label: str, value: str, width: int, tone: str = "text") -> list[Line]:
    pieces = wrap(value, max(width - 15, 10))
    return [_field(label if i == 0 else "", piece, tone) for i, piece in enumerate(pieces)]


def _quantiles(label: str, q: Quantiles | None) -> Line:
    if q is None:
        return _field(label, figures.NONE, "dim")
    return [
        *_field(label, f"{figures.pair_ms(q.p50, q.p99):>14}"),
        (f"   of {figures.count(q.count)}", "dim"),
    ]


def _title(text: str, width: int) -> Line:
    return [(f" {text} ", "title"), ("─" * max(0, width - cell_len(text) - 3), "frame")]


def _ended(process: Process, now: float) -> str:
    last = process.exit
    if last is None:
        return ""
    how = (
        f"signal {last.signal}"
        if last.signal is not None
        else f"code {last.code}"
        if last.code is not None
        else "?"
    )
    return f"{how}, {'asked for' if last.asked else 'not asked for'}, {figures.uptime(now - last.at)} ago"


def detail(
    state: ClusterState, process: Process, history: History, width: int, now: float, window: int
) -> list[Line]:
    """The lines of a process: state, start-up, figures, charts, history, command."""
    mark, word, tone = presence(process)
    lines: list[Line] = [[(f" {mark} {word}", tone), (f"  for {figures.uptime(now - process.since)}", "dim")]]
    if why := processes.reason(process):
        lines += _folded("reason", why, width, "warn")
    if step := process.milestone:
        full, rest = figures.half(step.fraction, max(10, min(40, width - 40)))
        eta = f"  ~{figures.uptime(step.eta_s)} left" if step.eta_s is not None else ""
        lines.append(
            [
                (" start-up     ", "dim"),
                (full, "busy"),
                (rest, "frame"),
                (f" {step.fraction:4.0%}  {clean(step.text)}{eta}", "busy"),
            ]
        )
    lines.append(_field("role", f"{process.role.value}   device {clean(process.device) or figures.NONE}"))
    lines.append(
        _field("address", f"{clean(process.url) or figures.NONE}   pid {process.pid or figures.NONE}")
    )
    up = figures.uptime(now - process.started_at) if process.started_at else figures.NONE
    used = f"cpu {figures.percent(process.cpu_percent)}   mem {figures.gib(process.rss_bytes)}"
    lines.append(_field("up", f"{up}   restarts {process.restarts}   {used}"))
    if ended := _ended(process, now):
        lines.append(_field("last exit", ended, "text" if process.exit and process.exit.asked else "warn"))
    lines.append([])
    if process.role is Role.ENCODER:
        lines += _encoder(process, history, width)
    elif process.role is Role.PD:
        lines += _pd(state, process, width, now)
    lines += _charts(process, history, width, window)
    about = [e for e in state.events if e.subject == process.name][-8:]
    if about:
        lines.append(_title("History", width))
        for e in reversed(about):
            lines.append(
                [
                    (f" {figures.clock_ms(e.at, 0)}  ", "dim"),
                    (clean(e.text), "text" if e.severity == "info" else "warn"),
                ]
            )
        lines.append([])
    if process.last_lines:
        lines.append(_title("Last lines of the life that failed", width))
        lines += [[(" " + clean(text), "error")] for text in process.last_lines]
        lines.append([])
    if process.argv:
        lines.append(_title("Command", width))
        lines += [
            [(" " + piece, "dim")] for piece in wrap(clean(shlex.join(process.argv)), max(width - 2, 10))
        ]
    return lines


def _encoder(process: Process, history: History, width: int) -> list[Line]:
    lines: list[Line] = [_title("Encoder", width)]
    e = process.encoder
    if e is None:
        return [*lines, [(" the proxy does not know it (yet)", "dim")], []]
    lines.append(
        _field(
            "for proxy",
            f"{e.state}{'  ' + clean(e.reason) if e.reason else ''}",
            "text" if e.state == "ready" else "warn",
        )
    )
    lines.append(_field("holds", f"{e.inflight} being encoded, {e.staged} staged for the PD"))
    if e.oldest_inflight_s >= 1:
        lines.append(_field("oldest", f"{figures.seconds(e.oldest_inflight_s)} s"))
    per_s = figures.rate(history.rate(process.name))
    lines.append(_field("items", f"{figures.count(e.items)}   {per_s}/s   errors {figures.count(e.errors)}"))
    lines.append(_field("encode", f"{figures.pair_ms(e.encode_ms_p50, e.encode_ms_p99):>14}   p50/p99"))
    t = process.transfer
    lines.append(_quantiles("transfer", t.total if t else None))
    if t is not None:
        lines += [_quantiles("  push", t.push), _quantiles("  wait", t.wait), _quantiles("  pull", t.pull)]
    return [*lines, []]


def _pd(state: ClusterState, process: Process, width: int, now: float) -> list[Line]:
    lines: list[Line] = [_title("PD", width)]
    pd = process.pd
    if pd is None:
        return [*lines, [(" the proxy does not know it (yet)", "dim")], []]
    lines.append(
        _field(
            "for proxy",
            f"{pd.state}{'  ' + clean(pd.reason) if pd.reason else ''}",
            "text" if pd.state == "ready" else "warn",
        )
    )
    lines.append(_field("in flight", f"{pd.inflight} requests"))
    if pd.epoch is not None:
        lines.append(_field("epoch", f"began {figures.uptime(now - pd.epoch)} ago"))
    lines.append(_quantiles("first byte", state.cluster.ttft))
    t = state.cluster.transfer
    lines.append(_quantiles("transfer", t.total if t else None))
    if t is not None:
        lines += [_quantiles("  push", t.push), _quantiles("  wait", t.wait), _quantiles("  pull", t.pull)]
    return [*lines, []]


def _charts(process: Process, history: History, width: int, window: int) -> list[Line]:
    keys = [("cpu", "CPU %", 1.0)]
    if process.role is Role.ENCODER:
        keys = [("items", "items/s", 1.0), ("held", "held items", 1.0), *keys]
    lines: list[Line] = []
    room = min(width - 2, 100)
    for key, label, _ in keys:
        if not history.get(f"{key}:{process.name}").last(1):
            continue
        lines.append([(f" {fit(label, 12)}", "dim"), (f" last {window // 60} min", "dim")])
        lines += flow.chart(history, ((f"{key}:{process.name}", "bar"),), room, 3, window)
    return [*lines, []] if lines else []

"""All that is known of one process, as lines."""

import shlex

from eccon.console.draw import figures, flow, processes
from eccon.console.draw.marks import presence
from eccon.console.draw.text import Line, cell_len, clean, fit, wrap
from eccon.console.history import History
from eccon.model import ClusterState, Process, Quantiles, Role

__all__ = ["detail"]

GUARD = {
    "gate": "on: a lost image fails its request alone",
    "wrap": "on, by wrapping the scheduler: a lost image fails its request alone",
    "hooks": "partly: a lost image stalls the engine for seconds, then fails its request",
    "vendor": "off: the guard found a version it does not know",
    "off": "off: an encoder that crashes at the wrong moment takes the PD along",
}


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
    if process.external:
        lines.append(_field("external", "started by others: watched and routed to, never signalled", "dim"))
    lines.append([])
    if process.role is Role.ENCODER:
        lines += _encoder(process, history, width)
    elif process.role is Role.PD:
        lines += _pd(state, process, width, now)
    lines += _npus(process, width)
    lines += _charts(process, history, width, window)
    lines += _milestones(process, width)
    about = [e for e in state.events if e.subject == process.name][-12:]
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
    if process.env:
        lines += [[], _title("Environment that eccon sets", width)]
        for name, value in process.env:
            lines += [[(" " + piece, "dim")] for piece in wrap(clean(f"{name}={value}"), max(width - 2, 10))]
    return lines


def _npus(process: Process, width: int) -> list[Line]:
    """A line a device, and one for each process that uses it."""
    if not process.npus:
        return []
    lines: list[Line] = [_title("Devices", width)]
    head = f" {'device':<8} {'name':<12} {'use':>5} {'memory':>13} {'temp':>5} {'power':>7} {'state':<12}"
    lines.append([(head, "head")])
    for n in process.npus:
        bad = n.pstate in processes.BAD_PSTATES or n.status not in ("", "normal")
        said = " ".join(
            s for s in (n.pstate, processes.BAD_PSTATES.get(n.pstate, ""), _unusual(n.status)) if s
        )
        use = figures.NONE if n.util_percent is None else f"{n.util_percent:.0f}%"
        heat = figures.NONE if n.temperature_c is None else f"{n.temperature_c:.0f}°"
        power = figures.NONE if n.power_w is None else f"{n.power_w:.1f} W"
        memory = f"{figures.gib(n.memory_used)}/{figures.gib(n.memory_total)}"
        lines.append(
            [
                (f" {fit(clean(n.device), 8)} {fit(clean(n.name), 12)} ", "text"),
                (f"{use:>5} {memory:>13} {heat:>5} {power:>7} ", "text"),
                (clean(said), "warn" if bad else "dim"),
            ]
        )
        lines += [
            [(f"   pid {c.pid}  {clean(c.process)}  {figures.gib(c.memory_bytes)}  {clean(c.status)}", "dim")]
            for c in n.contexts
        ]
    return [*lines, []]


def _unusual(status: str) -> str:
    return "" if status == "normal" else status


def _milestones(process: Process, width: int) -> list[Line]:
    """The steps of its start, each with when it was reached and how long it took."""
    if not process.milestones:
        return []
    lines: list[Line] = [_title("Start-up", width)]
    last = max(at for _, at in process.milestones) or 1.0
    before = 0.0
    for text, at in process.milestones:
        full, rest = figures.half((at - before) / last, 20)
        lines.append(
            [
                (f" {figures.seconds(at):>6} s  ", "dim"),
                (full, "busy"),
                (rest, "frame"),
                (f"  {clean(text)}", "text"),
            ]
        )
        before = at
    return [*lines, []]


def _counts(process: Process) -> list[Line]:
    """What the connector told, and how well it is guarded."""
    lines: list[Line] = []
    if process.guard:
        shaky = process.guard in {"hooks", "vendor"}
        lines.append(_field("guard", GUARD.get(process.guard, process.guard), "warn" if shaky else "text"))
    c = process.connector
    if c is None:
        return lines
    if process.role is Role.PD:
        text = f"{figures.count(c.received)} received, {figures.count(c.completed)} pulled"
        return [*lines, _field("connector", text)]
    text = f"{figures.count(c.pushed)} pushed, {figures.count(c.acked)} acknowledged, "
    style = "warn" if c.evicted else "text"
    return [*lines, _field("connector", f"{text}{figures.count(c.evicted)} evicted", style)]


def _encoder(process: Process, history: History, width: int) -> list[Line]:
    lines: list[Line] = [_title("Encoder", width)]
    e = process.encoder
    if e is None:
        return [*lines, [(" the proxy does not know it (yet)", "dim")], *_counts(process), []]
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
    return [*lines, *_counts(process), []]


def _pd(state: ClusterState, process: Process, width: int, now: float) -> list[Line]:
    lines: list[Line] = [_title("PD", width)]
    pd = process.pd
    if pd is None:
        return [*lines, [(" the proxy does not know it (yet)", "dim")], *_counts(process), []]
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
    if lost := state.cluster.lost_guard_events:
        lines.append(_field("", f"{figures.count(lost)} events of the guards were lost on the way", "warn"))
    return [*lines, *_counts(process), []]


def _charts(process: Process, history: History, width: int, window: int) -> list[Line]:
    keys = [("cpu", "CPU %")]
    if process.npus:
        keys.insert(0, ("npu", "NPU %"))
    if process.role is Role.ENCODER:
        keys = [("items", "items/s"), ("held", "held items"), *keys]
    lines: list[Line] = []
    room = min(width - 2, 100)
    for key, label in keys:
        if not history.get(f"{key}:{process.name}").last(1):
            continue
        lines.append([(f" {fit(label, 12)}", "dim"), (f" last {window // 60} min", "dim")])
        lines += flow.chart(history, ((f"{key}:{process.name}", "bar"),), room, 3, window)
    return [*lines, []] if lines else []

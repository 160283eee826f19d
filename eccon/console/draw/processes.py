"""The process table: one line a process, figures where it serves, its reason where it does not."""

from collections.abc import Mapping, Sequence

import msgspec

from eccon.console.draw import figures
from eccon.console.draw.columns import Column, choose, heading, row
from eccon.console.draw.marks import STATES, presence
from eccon.console.draw.text import Line, Part, clean, fit, fit_line, line_width
from eccon.model import ClusterInfo, ClusterState, Process, Role, State

__all__ = ["Row", "matches", "reason", "table"]

SPEAKING = {State.STARTING, State.LOADING, State.WAITING, State.BACKOFF, State.FAILED, State.BLOCKED}
"""States whose reason or progress is worth more than figures that stand still."""

BAR = 10
BAD_PSTATES = {"P10": "throttled by heat", "P12": "hangs"}
LAST_ERROR, LAST_ERROR_FROM = 11, 146
"""The least cells of the last error, in a table as wide as that; of a narrower one another line tells it."""
SPAN_FROM = ("items", "bar", "rate", "encode", "transfer")


class Row(msgspec.Struct, frozen=True):
    """A process and what its line needs beside it."""

    process: Process
    cluster: ClusterInfo
    now: float
    rate: float
    """Items a second, over the last seconds."""
    most: int
    """Items of the busiest encoder: a full bar."""


def reason(process: Process) -> str:
    """Why a process is in its state, in short."""
    if process.reason:
        return clean(process.reason)
    return _death(process) if process.state in (State.BACKOFF, State.FAILED, State.STOPPED) else ""


def _death(process: Process) -> str:
    """How its last life ended, when nobody had asked it to."""
    ended = process.exit
    if ended is None or ended.asked:
        return ""
    if ended.signal is not None:
        return f"killed by signal {ended.signal}"
    return "" if ended.code is None else f"exited with code {ended.code}"


def _name(r: Row) -> Part:
    return clean(r.process.name), "text"


def _state(r: Row) -> Part:
    return presence(r.process)[1:]


def _staying(text: str, quiet: bool = True) -> Part:
    return text, "dim" if quiet or text == figures.NONE else "text"


def _uptime(r: Row) -> Part:
    p = r.process
    if p.started_at is None:
        return figures.NONE, "dim"
    return _staying(figures.uptime(r.now - p.started_at))


def _inflight(r: Row) -> Part:
    p = r.process
    if p.encoder is not None:
        busy = p.encoder.inflight + p.encoder.staged
        return f"{p.encoder.inflight}/{p.encoder.staged}", "text" if busy else "dim"
    if p.pd is not None:
        return f"{p.pd.inflight}/{figures.NONE}", "text" if p.pd.inflight else "dim"
    if p.role is Role.PROXY and p.state is State.READY:
        return f"{r.cluster.inflight}/{figures.NONE}", "text" if r.cluster.inflight else "dim"
    return figures.NONE, "dim"


def _items(r: Row) -> Part:
    p = r.process
    if p.encoder is not None:
        return figures.count(p.encoder.items), "text"
    if p.role is Role.PROXY and p.state is State.READY:
        return figures.count(r.cluster.requests), "dim"
    return figures.NONE, "dim"


def _bar(r: Row) -> Part:
    p = r.process
    if p.encoder is None or not r.most:
        return "", "bar"
    return figures.bar(p.encoder.items / r.most, BAR), "bar"


def _rate(r: Row) -> Part:
    return (f"{figures.rate(r.rate)}/s", "text") if r.rate >= 0.05 else ("", "dim")


def _encode(r: Row) -> Part:
    p = r.process
    if p.encoder is not None:
        return _staying(figures.pair_ms(p.encoder.encode_ms_p50, p.encoder.encode_ms_p99), quiet=False)
    if p.role is Role.PD and (ttft := r.cluster.ttft) is not None:
        return f"ttft {figures.pair_ms(ttft.p50, ttft.p99)}", "dim"
    return figures.NONE, "dim"


def _transfer(r: Row) -> Part:
    if (t := r.process.transfer) is None:
        return figures.NONE, "dim"
    return _staying(figures.pair_ms(t.total.p50, t.total.p99), quiet=False)


def _restarts(r: Row) -> Part:
    n = r.process.restarts
    return (str(n), "warn") if n else ("0", "dim")


def _npu_use(r: Row) -> Part:
    known = [n.util_percent for n in r.process.npus if n.util_percent is not None]
    return (f"{sum(known) / len(known):.0f}%", "text") if known else (figures.NONE, "dim")


def _npu_memory(r: Row) -> Part:
    known = [n.memory_used for n in r.process.npus if n.memory_used is not None]
    return (figures.gib(sum(known)), "dim") if known else (figures.NONE, "dim")


def _npu_heat(r: Row) -> Part:
    known = [n.temperature_c for n in r.process.npus if n.temperature_c is not None]
    if not known:
        return figures.NONE, "dim"
    throttled = any(n.pstate in BAD_PSTATES for n in r.process.npus)
    return f"{max(known):.0f}°", "warn" if throttled else "text"


def _npu_pstate(r: Row) -> Part:
    """The state that needs a look, else the busiest one's."""
    states = [n.pstate for n in r.process.npus if n.pstate]
    worst = next((s for s in states if s in BAD_PSTATES), None)
    if worst is not None:
        return worst, "warn"
    return (min(states, key=lambda s: (len(s), s)), "dim") if states else (figures.NONE, "dim")


COLUMNS: tuple[Column[Row], ...] = (
    Column("mark", "", 1, 0, lambda r: (presence(r.process)[0], presence(r.process)[2])),
    Column("name", "name", 11, 0, _name),
    Column("state", "state", 8, 0, _state),
    Column("role", "role", 7, 19, lambda r: (r.process.role.value, "dim")),
    Column("device", "device", 6, 2, lambda r: _staying(r.process.device or figures.NONE)),
    Column("port", "port", 5, 9, lambda r: _staying(str(r.process.port or figures.NONE)), right=True),
    Column("pid", "pid", 7, 13, lambda r: _staying(str(r.process.pid or figures.NONE)), right=True),
    Column("up", "up", 6, 8, _uptime, right=True),
    Column("restarts", "rst", 3, 14, _restarts, right=True),
    Column("cpu", "cpu", 5, 10, lambda r: _staying(figures.percent(r.process.cpu_percent)), right=True),
    Column("rss", "mem", 5, 10, lambda r: _staying(figures.gib(r.process.rss_bytes)), right=True),
    Column("npu", "npu%", 4, 6, _npu_use, right=True),
    Column("npumem", "nmem", 5, 11, _npu_memory, right=True),
    Column("heat", "temp", 4, 7, _npu_heat, right=True),
    Column("pstate", "pst", 3, 12, _npu_pstate, right=True),
    Column("inflight", "in/st", 5, 1, _inflight, right=True),
    Column("items", "items", 6, 3, _items, right=True),
    Column("bar", "", BAR, 15, _bar),
    Column("rate", "", 6, 16, _rate, right=True),
    Column("encode", "enc p50/p99", 15, 5, _encode, right=True),
    Column("transfer", "xfer p50/p99", 13, 4, _transfer, right=True),
)
OF_NPUS = {"npu", "npumem", "heat", "pstate"}


def matches(process: Process, words: str) -> bool:
    """Whether all words of a filter occur in what the table shows of a process."""
    shown = (process.name, presence(process)[1], process.role.value, process.device, process.reason)
    text = " ".join(shown).lower()
    return all(word in text for word in words.lower().split())


def table(
    state: ClusterState, width: int, now: float, rates: Mapping[str, float], words: str = ""
) -> tuple[Line, list[tuple[str, Line]]]:
    """The heading, and (name, line) of each process that matches `words`."""
    shown = [p for p in state.processes if matches(p, words)]
    longest = max((len(p.name) for p in state.processes), default=0)
    absent = set() if any(p.npus for p in state.processes) else set(OF_NPUS)
    if not any(p.device for p in state.processes):
        absent.add("device")
    known = [c for c in _named(longest, width) if c.key not in absent]
    columns = choose(known, width - LAST_ERROR if width >= LAST_ERROR_FROM else width)
    most = max((p.encoder.items for p in state.processes if p.encoder), default=0)
    room = width - sum(c.width + 1 for c in columns)
    rows = []
    for process in shown:
        item = Row(process, state.cluster, now, rates.get(process.name, 0.0), most)
        line = _spoken(columns, item, width) or row(columns, item)
        if room >= 8 and (why := _why(process, now))[0]:
            line = [*fit_line(line, width - room), (fit(why[0], room), why[1])]
        rows.append((process.name, line))
    head = heading(columns)
    if room >= 8:
        head = [*head, (" last error", "head")]
    return head, rows


def _named(longest: int, width: int) -> list[Column[Row]]:
    """The columns with the name as wide as the longest, within a quarter of the line."""
    name = min(max(longest, 9), max(11, width // 4))
    if width < 26:
        name = max(4, width - 11)
    return [msgspec.structs.replace(c, width=name) if c.key == "name" else c for c in COLUMNS]


def _why(process: Process, now: float) -> Part:
    """What is wrong; of one with which nothing is, how its last life ended."""
    if process.state in SPEAKING:
        return "", "text"
    if process.state is not State.READY:
        return reason(process), "error"
    info = process.encoder
    if why := (info.reason if info is not None else "") or process.reason:
        return clean(why), "error"
    if (death := _death(process)) and process.exit is not None:
        return f"{death} {figures.uptime(now - process.exit.at)} ago", "dim"
    return "", "text"


def _spoken(columns: Sequence[Column[Row]], item: Row, width: int) -> Line | None:
    """The line of a process that is not serving: state columns, then progress or reason to the edge."""
    process = item.process
    if process.state not in SPEAKING:
        return None
    head = [c for c in columns if c.key not in SPAN_FROM and c.key != "inflight"]
    line = row(head, item)
    room = width - line_width(line) - 2
    if room < 6:
        return row(columns, item)
    line.append(("  ", "text"))
    step = process.milestone
    if step is None or process.state not in (State.STARTING, State.LOADING):
        text = reason(process)
        if process.state is State.BACKOFF and process.retry_at is not None:
            text = f"again in {max(0, round(process.retry_at - item.now))} s  {text}"
        tone = STATES[process.state][1]
        return [*line, (fit(text, room), tone if tone != "ok" else "text")]
    tail = f" {round(step.fraction * 100):>3}%"
    if step.eta_s is not None:
        tail += f" ~{figures.uptime(step.eta_s)}"
    label = clean(step.text)
    wanted = min(max(len(label), 12), 24)
    cells = min(24, room - wanted - 1 - len(tail))
    if cells < 4:
        return [*line, (fit(label, max(room - len(tail), 0)) + tail, "busy")]
    full, rest = figures.half(step.fraction, cells)
    return [*line, (fit(label, wanted) + " ", "busy"), (full, "busy"), (rest, "frame"), (tail, "busy")]

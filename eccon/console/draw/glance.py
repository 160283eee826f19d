"""The overview's parts, and where they are: what its first frame and its widgets both draw."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from eccon.console import actions
from eccon.console.draw import charts, events, figures, flow, header, processes, traces
from eccon.console.draw.keys import keys_line
from eccon.console.draw.shape import Shape
from eccon.console.draw.text import Line, clean, fit_line
from eccon.console.draw.window import window
from eccon.console.history import History
from eccon.model import Alarm, ClusterState, Process

__all__ = ["IN_FIRST_ROW", "IN_SECOND_ROW", "NO_REQUEST", "PANELS", "TITLES", "Block", "Scene", "blocks"]

IN_FIRST_ROW = ("flow", "transfer", "ttft", "fanout")
IN_SECOND_ROW = ("requests", "queue", "tokens")
PANELS = tuple(p for p in charts.PANELS if p.name in (*IN_FIRST_ROW, *IN_SECOND_ROW))
FLOW_WIDTH = 62
CHART_ROWS = 5
EVENTS_ROWS = 8
TITLES = {
    "processes": "Processes",
    "flow": "Flow",
    "fanout": "Fan-out items/s",
    "traces": "Traces",
    "events": "Events",
}
NO_REQUEST = "no request yet   p sends a test prompt"


def detail(process: Process, now: float) -> Line:
    """A process in one line, for terminals whose table has no room for it."""
    parts: list[str] = [process.role.value]
    if process.url:
        parts.append(process.url)
    if process.pid is not None:
        parts.append(f"pid {process.pid}")
    if process.started_at is not None:
        parts.append(f"up {figures.uptime(now - process.started_at)}")
    if process.cpu_percent is not None:
        parts.append(f"cpu {figures.percent(process.cpu_percent)}")
    if process.rss_bytes is not None:
        parts.append(f"mem {figures.gib(process.rss_bytes)}")
    if process.restarts:
        parts.append(f"{process.restarts} restart{'s' if process.restarts > 1 else ''}")
    line: Line = [(f" {clean(process.name)}  ", "title"), ("  ".join(clean(p) for p in parts), "dim")]
    if why := processes.reason(process):
        line.append((f"  {why}", "warn"))
    return line


def alarm_keys(keymap: Mapping[str, str]) -> dict[str, str]:
    """The key of each action, for alarms that name one."""
    return {a.name: actions.key_label(a, keymap) for a in actions.in_scope("overview")}


def alarm_lines(
    alarms: Sequence[Alarm], shape: Shape, now: float, keys: dict[str, str], chosen: str
) -> list[Line]:
    """As many alarms as have room; the last line says how many more there are.

    Where not all have room those about the chosen process come first.
    """
    room = shape.alarms
    if len(alarms) > room:
        alarms = sorted(alarms, key=lambda a: a.subject != chosen)
    more = f" +{len(alarms) - room} " if len(alarms) > room else ""
    lines = [
        events.alarm(a, shape.width - (len(more) if i == room - 1 else 0), now, keys, chosen=chosen)
        for i, a in enumerate(alarms[:room])
    ]
    if more:
        lines[-1] = [*lines[-1], (more, "warn")]
    return lines


class Block(msgspec.Struct, frozen=True):
    """Lines at a place of the screen. With a title they are a panel's: its frame is around them."""

    x: int
    y: int
    width: int
    height: int
    """The frame included."""
    lines: list[Line]
    title: str = ""
    ground: str = "background"
    """The theme's colour behind them."""
    cursor: int = -1
    """The line that is chosen."""
    chosen: bool = False
    """Whether keys go there."""


class Scene(msgspec.Struct, frozen=True):
    """All that the overview's first frame is made from."""

    state: ClusterState
    shape: Shape
    now: float
    window: int
    """Seconds that the charts span."""
    flag: str
    footer: Iterable[actions.Action]
    keymap: Mapping[str, str]


def blocks(scene: Scene) -> list[Block]:
    """The whole overview, top to bottom."""
    shape, state, now = scene.shape, scene.state, scene.now
    width = shape.width
    draw = header.headers if shape.header == 2 else lambda *args: [header.header(*args)]
    out = [Block(0, 0, width, shape.header, draw(state, width, now, "", scene.flag), ground="panel")]
    y = shape.header
    last = shape.height - 1
    history = History()
    history.feed(state, now)

    def panel(name: str, x: int, wide: int, high: int, *, title: str = "") -> Block:
        frame = 1 if shape.boxed else 0
        inner_width, inner_height = wide - 2 * frame, high - 1 - frame
        lines = _inside(name, scene, history, inner_width, inner_height)
        there = name == "processes"
        cursor = 1 if there and state.processes else -1
        return Block(x, y, wide, high, lines, title or TITLES[name], cursor=cursor, chosen=there)

    high = shape.table(state.processes)
    out.append(panel("processes", 0, width, high))
    y += high
    chosen = state.processes[0] if state.processes else None
    if not shape.wide and not shape.short:
        line = fit_line(detail(chosen, now) if chosen else [], width)
        out.append(Block(0, y, width, 1, [line]))
        y += 1
    keys = alarm_keys(scene.keymap)
    if alarms := alarm_lines(state.alarms, shape, now, keys, chosen.name if chosen else ""):
        out.append(Block(0, y, width, len(alarms), alarms, ground="surface"))
        y += len(alarms)
    titles = {p.name: charts.title(p, state, history) for p in PANELS}
    for row in _chart_rows(shape):
        for name, x, wide in row:
            out.append(panel(name, x, wide, CHART_ROWS, title=titles.get(name, "")))
        y += CHART_ROWS
    rest = last - y
    if shape.short:
        out.append(Block(0, y, width, rest, []))
    elif shape.beside:
        left = width * 3 // 5
        out.append(panel("traces", 0, left, rest))
        out.append(panel("events", left, width - left, rest))
    else:
        below = EVENTS_ROWS if shape.below else 0
        out.append(panel("traces", 0, width, rest - below))
        if below:
            y += rest - below
            out.append(panel("events", 0, width, below))
    footer = keys_line(scene.footer, scene.keymap, width)
    out.append(Block(0, last, width, 1, [footer], ground="panel"))
    return out


def _chart_rows(shape: Shape) -> list[list[tuple[str, int, int]]]:
    """(name, x, width) of the charts of each row."""
    rows = []
    if shape.charts:
        names = [n for n in IN_FIRST_ROW[1:] if shape.wide or n != "ttft"]
        rows.append([("flow", 0, FLOW_WIDTH), *_shared(names, FLOW_WIDTH, shape.width)])
    if shape.more:
        rows.append(_shared(IN_SECOND_ROW, 0, shape.width))
    return rows


def _shared(names: Sequence[str], left: int, right: int) -> list[tuple[str, int, int]]:
    edges = [left + (right - left) * i // len(names) for i in range(len(names) + 1)]
    return [(name, edges[i], edges[i + 1] - edges[i]) for i, name in enumerate(names)]


def _inside(name: str, scene: Scene, history: History, width: int, height: int) -> list[Line]:
    state, now = scene.state, scene.now
    if width <= 0 or height <= 0:
        return []
    if name == "processes":
        heading, rows = processes.table(state, width, now, history.rates())
        return window(heading, rows, 0, width, height, "" if header.unknown(state) else "no process yet")
    if name == "traces":
        layout = traces.Layout(width, now)
        return window(
            layout.heading, layout.rows(reversed(state.traces[-200:])), 0, width, height, NO_REQUEST
        )
    if name == "events":
        return [events.event(e, width) for e in reversed(state.events[-height:])]
    if name == "flow":
        return flow.flow(state, width, flow.token_rate(state.traces, now))
    if name == "fanout":
        return flow.fanout(state, history, width, height, scene.window)
    series = next(p.series for p in PANELS if p.name == name)
    return flow.chart(history, series, width, height, scene.window)

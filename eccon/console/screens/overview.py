"""The default screen: the whole cluster at a glance."""

from string import ascii_lowercase
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.content import Content

from eccon.console.draw import charts, events, flow, glance, processes, traces
from eccon.console.draw.header import unknown
from eccon.console.draw.shape import Shape
from eccon.console.draw.text import clean, fit_line
from eccon.console.screens.base import ConsoleScreen, bindings
from eccon.console.screens.dialogs import Jump
from eccon.console.widgets.lines import Lines
from eccon.console.widgets.panel import Panel
from eccon.console.widgets.rows import Rows
from eccon.model import Process

__all__ = ["Overview"]

CHARTS = (*glance.IN_FIRST_ROW, *glance.IN_SECOND_ROW)
PANES = ("processes", "traces", "events", *CHARTS)
"""In the order of their letters."""


class Overview(ConsoleScreen):
    """Processes, alarms, charts, traces, events; what does not fit is a key away."""

    SCOPE: ClassVar[str] = "overview"
    BINDINGS: ClassVar[list[BindingType]] = bindings("overview")
    AUTO_FOCUS = "#processes"

    def __init__(self) -> None:
        super().__init__()
        self.words = ""
        self._names: tuple[str, ...] = ()
        self._titles: dict[str, str] = {}
        self._letters: dict[str, str] = {}

    def body(self) -> ComposeResult:
        with Panel(id="p-processes", classes="panel"):
            yield Rows(id="processes")
        yield Lines(id="detail")
        yield Lines(id="alarms")
        with Horizontal(id="middle"):
            for name in glance.IN_FIRST_ROW:
                with Panel(id=f"p-{name}", classes="panel"):
                    yield Lines(id=name)
        with Horizontal(id="more"):
            for name in glance.IN_SECOND_ROW:
                with Panel(id=f"p-{name}", classes="panel"):
                    yield Lines(id=name)
        with Horizontal(id="bottom"):
            with Panel(id="p-traces", classes="panel"):
                yield Rows(glance.NO_REQUEST, sticky_top=True, id="traces")
            with Panel(id="p-events", classes="panel"):
                yield Lines(id="events")

    def on_mount(self) -> None:
        for name, title in glance.TITLES.items():
            self.query_one(f"#p-{name}").border_title = title

    @property
    def processes(self) -> Rows:
        """The table of processes."""
        return self.query_one("#processes", Rows)

    @property
    def traces(self) -> Rows:
        """The list of requests."""
        return self.query_one("#traces", Rows)

    def chosen_process(self) -> Process | None:
        """The process under the cursor."""
        return self.state.process(self.processes.chosen or "")

    def marks(self, width: int, height: int) -> dict[str, bool]:
        return Shape(width, height, self.console_app.low_bandwidth).classes()

    def fit_size(self, width: int, height: int) -> None:
        shown = [p for p in self.state.processes if processes.matches(p, self.words)]
        self.query_one("#p-processes").styles.height = Shape(width, height).table(shown)

    def refresh_body(self, now: float) -> None:
        state, app = self.state, self.console_app
        names = tuple(p.name for p in state.processes if processes.matches(p, self.words))
        if names != self._names:
            self._names = names
            self.fit_size(*self.size)
        table = self.processes
        heading, rows = processes.table(state, table.size.width, now, app.history.rates(), self.words)
        none = "" if unknown(state) else "no process yet"
        table.put(heading, rows, f"no process matches {self.words!r}" if self.words else none)
        self._title("processes", f"Processes  filter: {self.words}" if self.words else "Processes")
        self._draw_detail(now)
        self._draw_alarms(now)
        if self.has_class("-charts"):
            self._draw_charts()
        self._draw_traces(now)
        recent = self.query_one("#events", Lines)
        if recent.size.height:
            newest = reversed(state.events[-recent.size.height :])
            recent.show([events.event(e, recent.size.width) for e in newest])

    def _title(self, name: str, title: str) -> None:
        if letter := self._letters.get(name):
            title = f"({letter}) {title}"
        if self._titles.get(name) != title:
            self._titles[name] = title
            self.query_one(f"#p-{name}", Panel).entitle(Content(clean(title)))

    def _draw_detail(self, now: float) -> None:
        line = self.query_one("#detail", Lines)
        process = self.chosen_process()
        if line.size.height:
            line.show([fit_line(glance.detail(process, now) if process else [], line.size.width)])

    def _draw_alarms(self, now: float) -> None:
        app = self.console_app
        strip = self.query_one("#alarms", Lines)
        alarms = [a for a in self.state.alarms if a.key not in app.acknowledged]
        keys = glance.alarm_keys(app.settings.keys)
        lines = glance.alarm_lines(alarms, Shape(*self.size), now, keys, self.processes.chosen or "")
        strip.styles.height = len(lines)
        strip.show(lines)

    def _draw_charts(self) -> None:
        app = self.console_app
        history, window = app.history, app.window
        box = self.query_one("#flow", Lines)
        box.show(flow.flow(self.state, box.size.width, flow.token_rate(self.state.traces, app.now())))
        for panel in glance.PANELS:
            box = self.query_one(f"#{panel.name}", Lines)
            if box.size.height:
                self._title(panel.name, charts.title(panel, self.state, history))
                box.show(flow.chart(history, panel.series, box.size.width, box.size.height, window))
        box = self.query_one("#fanout", Lines)
        box.show(flow.fanout(self.state, history, box.size.width, box.size.height, window))

    def _draw_traces(self, now: float) -> None:
        box = self.traces
        if box.size.height:
            layout = traces.Layout(box.size.width, now)
            box.put(layout.heading, layout.rows(reversed(self.state.traces[-200:])))

    def on_rows_moved(self, message: Rows.Moved) -> None:
        if message.rows.id == "processes":
            now = self.console_app.now()
            self._draw_detail(now)
            self._draw_alarms(now)

    def on_rows_opened(self) -> None:
        self.console_app.act("open")

    def act_open(self) -> None:
        """The waterfall of the chosen request, or the detail of the chosen process."""
        if self.traces.has_focus:
            if self.traces.chosen:
                self.console_app.open_trace(self.traces.chosen)
        elif process := self.chosen_process():
            self.console_app.open_detail(process.name)

    def act_logs(self) -> None:
        """The lines of the chosen request, or the log of the chosen process."""
        chosen = self.traces.chosen if self.traces.has_focus else None
        if chosen and (trace := self.console_app.trace(chosen)):
            self.console_app.open_trace_logs(trace)
        else:
            self.console_app.act_logs()

    def act_attend(self) -> None:
        """Chooses the process of the first alarm that is not acknowledged, or of the one after the last."""
        seen = self.console_app.acknowledged
        names = [a.subject for a in self.state.alarms if a.key not in seen and self.state.process(a.subject)]
        if not names:
            self.console_app.say("no alarm is about a process")
            return
        at = names.index(self.processes.chosen) + 1 if self.processes.chosen in names else 0
        self.words = ""
        self.draw()
        self.processes.focus()
        self.processes.choose(names[at % len(names)])

    def act_window(self) -> None:
        """The next span of the charts."""
        self.console_app.next_window()

    def act_back(self) -> None:
        """Ends the filter."""
        if self.words:
            self.words = ""
            self.draw()

    def act_filter(self) -> None:
        """Asks for the words of a filter."""

        def done(words: str | None) -> None:
            if words is not None:
                self.words = words
                self.draw()

        self.console_app.ask_line("Filter processes", self.words, done)

    def act_jump(self) -> None:
        """Paints a letter on each pane; its key gives that pane the focus, or opens the screen of it."""
        panes = [name for name in PANES if self.query_one(f"#{name}").size.height]
        self._letters = dict(zip(panes, ascii_lowercase, strict=False))
        letters = {letter: name for name, letter in self._letters.items()}

        def name_them() -> None:
            for name in panes:
                if name in glance.TITLES:  # those of charts have figures: they are drawn anew
                    self._title(name, glance.TITLES[name])
            self.draw()

        def pressed(letter: str | None) -> None:
            self._letters = {}
            name_them()
            wanted = letters.get(letter or "", "")
            if wanted == "events":
                self.console_app.act("events")
            elif wanted in CHARTS:
                self.console_app.act("charts")
            elif wanted:
                self.query_one(f"#{wanted}").focus()

        name_them()
        self.console_app.push_screen(Jump("".join(letters)), pressed)

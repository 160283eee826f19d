"""One request as a waterfall."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from eccon.console.draw import waterfall
from eccon.console.draw.text import clean, fit_line
from eccon.console.export import write_chrome, write_json
from eccon.console.screens.base import ConsoleScreen, bindings
from eccon.console.widgets.lines import Lines
from eccon.console.widgets.rows import Rows
from eccon.model import Trace

__all__ = ["TraceScreen"]


class TraceScreen(ConsoleScreen):
    """A row for every item and attempt on one time axis."""

    SCOPE: ClassVar[str] = "trace"
    BINDINGS: ClassVar[list[BindingType]] = bindings("trace")
    AUTO_FOCUS = "#spans"

    def __init__(self, trace_id: str) -> None:
        super().__init__()
        self.trace_id = trace_id
        self._last: Trace | None = None

    def body(self) -> Iterable[Widget]:
        yield Lines(id="what")
        yield Rows("this request is not known any more", id="spans")
        yield Lines(id="legend")

    def trace(self) -> Trace | None:
        """The request, as last known."""
        self._last = self.console_app.trace(self.trace_id, exact=True) or self._last
        return self._last

    def refresh_body(self, now: float) -> None:
        trace = self.trace()
        spans = self.query_one("#spans", Rows)
        if trace is None:
            spans.put([], [])
            return
        width = self.size.width
        self.query_one("#what", Lines).show(waterfall.head(trace, width, now))
        (_, axis), *rows = waterfall.span_lines(trace, spans.size.width, now, self.state.events)
        spans.put(axis, [(f"{i}:{key}", line) for i, (key, line) in enumerate(rows)])
        legend = [
            (" ━ ", "encode"),
            ("encode  ", "dim"),
            ("═ ", "move"),
            ("push, pull  ", "dim"),
            ("┄ ", "dim"),
            ("wait for the PD's step  ", "dim"),
            ("╌ ", "gate"),
            ("gate  ", "dim"),
            ("━ ", "pd"),
            ("PD to first byte  ", "dim"),
            ("─ ", "stream"),
            ("stream", "dim"),
        ]
        self.query_one("#legend", Lines).show([fit_line(legend, width)])

    def act_logs(self) -> None:
        """The log lines of the chosen row's item; for any other row those of the request, in all logs."""
        if (trace := self.trace()) is None:
            return
        chosen = (self.query_one("#spans", Rows).chosen or "").partition(":")[2]
        uuids = {s.uuid: s.encoder for s in trace.spans if s.kind == "encode" and s.uuid}
        if chosen in uuids:
            self.console_app.open_logs(uuids[chosen], search=chosen)
        else:
            self.console_app.open_all_trace_logs(trace)

    def act_copy(self) -> None:
        """The request as curl."""
        if trace := self.trace():
            self.console_app.copy_trace(trace)

    def act_export(self) -> None:
        """The trace as JSON in a file."""
        if trace := self.trace():
            self.console_app.say(clean(write_json(trace)))

    def act_chrome(self) -> None:
        """The trace in Chrome's format in a file."""
        if trace := self.trace():
            self.console_app.say(clean(write_chrome(trace)))

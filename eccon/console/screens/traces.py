"""All requests, newest first: live, pausable, with a filter."""

from collections.abc import Iterable
from functools import partial
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from eccon.console.draw import traces
from eccon.console.draw.text import Line, clean, fit_line
from eccon.console.export import write_chrome, write_json
from eccon.console.past import Kept
from eccon.console.screens.base import ConsoleScreen, bindings
from eccon.console.widgets.lines import Lines
from eccon.console.widgets.rows import Rows
from eccon.model import Trace

__all__ = ["Traces"]


class Traces(ConsoleScreen):
    """The list of requests."""

    SCOPE: ClassVar[str] = "traces"
    BINDINGS: ClassVar[list[BindingType]] = bindings("traces")
    AUTO_FOCUS = "#list"

    def __init__(self) -> None:
        super().__init__()
        self.words = ""
        self.held: tuple[Trace, ...] | None = None

    def body(self) -> Iterable[Widget]:
        yield Lines(id="caption")
        yield Rows("no request yet", sticky_top=True, id="list")

    @property
    def rows(self) -> Rows:
        """The list."""
        return self.query_one("#list", Rows)

    def refresh_body(self, now: float) -> None:
        known = self.state.traces if self.held is None else self.held
        shown = [t for t in reversed(known) if traces.matches(t, self.words)]
        ids = frozenset(t.id for t in known) if len(self.console_app.past) else frozenset()
        past = self.console_app.past.newest_first(ids)
        older = [(i, kept) for i, kept in past if traces.matches(kept.words, self.words)]
        count = f" {len(shown) + len(older)} of {len(known) + len(past)}"
        caption = [(" Traces ", "title"), (count, "dim")]
        if self.words:
            caption.append((f"  filter: {clean(self.words)}", "accent"))
        if self.held is not None:
            missed = sum(t not in self.held for t in self.state.traces[-200:])
            caption.append((f"  paused, {missed} new or changed", "warn"))
        self.query_one("#caption", Lines).show([fit_line(caption, self.size.width)])
        none = (
            f"no request matches {self.words!r}" if self.words else "no request yet   p sends a test prompt"
        )
        layout = traces.Layout(self.rows.size.width, now)
        rows = layout.rows(shown) + [(i, partial(_packed_line, layout, kept)) for i, kept in older]
        self.rows.put(layout.heading, rows, none)

    def chosen(self) -> Trace | None:
        """The request under the cursor."""
        return self.console_app.trace(self.rows.chosen) if self.rows.chosen else None

    def on_rows_opened(self) -> None:
        self.console_app.act("open")

    def act_open(self) -> None:
        """The waterfall of the chosen request."""
        if self.rows.chosen:
            self.console_app.open_trace(self.rows.chosen)

    def act_pause(self) -> None:
        """Holds the list still, or lets it go on."""
        self.held = self.state.traces if self.held is None else None
        self.refresh_body(self.console_app.now())

    def act_logs(self) -> None:
        """The log lines of the chosen request."""
        if trace := self.chosen():
            self.console_app.open_trace_logs(trace)

    def act_copy(self) -> None:
        """The chosen request as curl."""
        if trace := self.chosen():
            self.console_app.copy_trace(trace)

    def act_export(self) -> None:
        """The chosen request as JSON in a file."""
        if trace := self.chosen():
            self.console_app.say(write_json(trace))

    def act_chrome(self) -> None:
        """The chosen request in Chrome's format in a file."""
        if trace := self.chosen():
            self.console_app.say(write_chrome(trace))

    def act_filter(self) -> None:
        """Asks for the words of a filter."""

        def done(words: str | None) -> None:
            if words is not None:
                self.words = words
                self.draw()

        self.console_app.ask_line("Filter requests: words, status, encoder, >seconds", self.words, done)


def _packed_line(layout: traces.Layout, kept: Kept) -> Line:
    return layout.line(kept.trace())

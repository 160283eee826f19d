"""Alarms at hand and the cluster's history."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from eccon.console import actions
from eccon.console.draw import events
from eccon.console.draw.text import Line, clean, fit_line
from eccon.console.screens.base import ConsoleScreen, bindings
from eccon.console.widgets.lines import Lines
from eccon.console.widgets.rows import Rows
from eccon.model import LogEvent

__all__ = ["Events"]


class Events(ConsoleScreen):
    """Newest first; enter opens the log of the event's subject."""

    SCOPE: ClassVar[str] = "events"
    BINDINGS: ClassVar[list[BindingType]] = bindings("events")
    AUTO_FOCUS = "#list"

    def __init__(self) -> None:
        super().__init__()
        self.words = ""
        self.held: tuple[LogEvent, ...] | None = None

    def body(self) -> Iterable[Widget]:
        yield Lines(id="caption")
        yield Lines(id="all-alarms")
        yield Rows("nothing happened yet", sticky_top=True, id="list")

    def refresh_body(self, now: float) -> None:
        app, state = self.console_app, self.state
        width = self.size.width
        alarms = self.query_one("#all-alarms", Lines)
        room = max(1, self.size.height // 3)
        alarms.styles.height = min(len(state.alarms), room)
        keys = {a.name: actions.key_label(a, app.settings.keys) for a in actions.ACTIONS}
        alarms.show(
            [events.alarm(a, width, now, keys, a.key in app.acknowledged) for a in state.alarms[:room]]
        )
        known = state.events if self.held is None else self.held
        words = self.words.lower().split()
        shown = [
            (f"{e.at}:{e.subject}:{e.text}", e)
            for e in reversed(known)
            if all(w in f"{e.subject} {e.text} {e.severity}".lower() for w in words)
        ]
        caption: Line = [(" Events ", "title"), (f" {len(shown)} of {len(known)}", "dim")]
        if state.alarms:
            caption.append((f"  {len(state.alarms)} alarm{'s' if len(state.alarms) > 1 else ''} now", "warn"))
        if self.words:
            caption.append((f"  filter: {clean(self.words)}", "accent"))
        if self.held is not None:
            caption.append(("  paused", "warn"))
        self.query_one("#caption", Lines).show([fit_line(caption, width)])
        rows = self.query_one("#list", Rows)
        none = f"no event matches {self.words!r}" if self.words else "nothing happened yet"
        rows.put([], [(key, events.event(e, rows.size.width)) for key, e in shown], none)

    def subject(self) -> str:
        """The process that the chosen event is about; empty for the cluster."""
        parts = (self.query_one("#list", Rows).chosen or "").split(":", 2)
        name = parts[1] if len(parts) > 1 else ""
        return name if self.state.process(name) else ""

    def on_rows_opened(self) -> None:
        self.console_app.act("open")

    def act_open(self) -> None:
        """The detail of the event's subject."""
        if name := self.subject():
            self.console_app.open_detail(name)

    def act_logs(self) -> None:
        """The log of the event's subject, or the daemon's, at the time of the event."""
        at = float((self.query_one("#list", Rows).chosen or "0:").partition(":")[0])
        self.console_app.open_logs(self.subject() or "daemon", at=int(at) or None)

    def act_pause(self) -> None:
        """Holds the list still, or lets it go on."""
        self.held = self.state.events if self.held is None else None
        self.refresh_body(self.console_app.now())

    def act_filter(self) -> None:
        """Asks for the words of a filter."""

        def done(words: str | None) -> None:
            if words is not None:
                self.words = words
                self.draw()

        self.console_app.ask_line("Filter events", self.words, done)

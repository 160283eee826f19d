"""All charts at once, at any size of the terminal."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from eccon.console.draw import charts
from eccon.console.draw.text import fit_line
from eccon.console.screens.base import ConsoleScreen, bindings
from eccon.console.widgets.lines import Lines

__all__ = ["Charts"]


class Charts(ConsoleScreen):
    """Requests, first byte, transfer, fan-out, queue, tokens over the chosen window."""

    SCOPE: ClassVar[str] = "charts"
    BINDINGS: ClassVar[list[BindingType]] = bindings("charts")

    def body(self) -> Iterable[Widget]:
        yield Lines(id="caption")
        yield Lines(id="grid")

    def refresh_body(self, now: float) -> None:  # noqa: ARG002  the history knows the time
        app = self.console_app
        span = f"  the last {app.window // 60} min"
        self.query_one("#caption", Lines).show(
            [fit_line([(" Charts", "title"), (span, "dim")], self.size.width)]
        )
        box = self.query_one("#grid", Lines)
        box.show(charts.grid(self.state, app.history, box.size.width, box.size.height, app.window))

    def act_window(self) -> None:
        """The next span of the charts."""
        self.console_app.next_window()

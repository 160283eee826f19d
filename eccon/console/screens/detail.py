"""One process: state, start-up, connector figures, charts, history, command."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from eccon.console.draw.detail import detail
from eccon.console.draw.text import clean, fit_line
from eccon.console.export import command_line
from eccon.console.screens.base import ConsoleScreen, bindings
from eccon.console.widgets.lines import Lines
from eccon.console.widgets.rows import Rows
from eccon.model import Process

__all__ = ["Detail"]


class Detail(ConsoleScreen):
    """All that is known of one process."""

    SCOPE: ClassVar[str] = "detail"
    BINDINGS: ClassVar[list[BindingType]] = bindings("detail")
    AUTO_FOCUS = "#lines"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.process_name = name

    def body(self) -> Iterable[Widget]:
        yield Lines(id="caption")
        yield Rows("this process left the cluster", document=True, id="lines")

    def chosen_process(self) -> Process | None:
        """The process at hand."""
        return self.state.process(self.process_name)

    def refresh_body(self, now: float) -> None:
        app = self.console_app
        process = self.chosen_process()
        self.query_one("#caption", Lines).show(
            [fit_line([(f" {clean(self.process_name)} ", "title")], self.size.width)]
        )
        rows = self.query_one("#lines", Rows)
        if process is None:
            rows.put([], [])
            return
        lines = detail(self.state, process, app.history, rows.size.width, now, app.window)
        rows.put([], [(str(i), line) for i, line in enumerate(lines)])

    def act_window(self) -> None:
        """The next span of the charts."""
        self.console_app.next_window()

    def act_copy(self) -> None:
        """The process's command."""
        if process := self.chosen_process():
            self.console_app.copy(command_line(process), "the command")

    def act_logs(self) -> None:
        """The process's log."""
        self.console_app.open_logs(self.process_name)

    def act_forward(self) -> None:
        """The next process."""
        self._turn(1)

    def act_backward(self) -> None:
        """The process before."""
        self._turn(-1)

    def _turn(self, by: int) -> None:
        names = [p.name for p in self.state.processes]
        if names:
            at = names.index(self.process_name) if self.process_name in names else 0
            self.process_name = names[(at + by) % len(names)]
            self.draw()

"""The choice of colours, previewed as the cursor moves."""

from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from eccon.console.screens.steady import SteadySize
from eccon.console.widgets.rows import Rows

if TYPE_CHECKING:
    from eccon.console.app import ConsoleApp

__all__ = ["ThemeChoice"]


class ThemeChoice(SteadySize, ModalScreen[None]):
    """All themes by name; enter keeps the one shown, escape the one before."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "keep", show=False, priority=True),
        Binding("escape,q", "drop", show=False),
    ]
    AUTO_FOCUS = "#list"

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Rows(id="list")

    @property
    def console_app(self) -> "ConsoleApp":
        """The app, by its own type."""
        return cast("ConsoleApp", self.app)

    def on_mount(self) -> None:
        app = self.console_app
        self._before = app.theme
        files = sorted(app.theme_files.values(), key=lambda f: f.name)
        rows = self.query_one("#list", Rows)
        rows.styles.height = len(files)
        self.query_one(".box").border_title = "Theme   enter keeps, esc not"
        rows.put([], [(f.name, [(f" {f.title}", "text")]) for f in files])
        rows.choose(app.theme)

    def on_rows_moved(self, message: Rows.Moved) -> None:
        if message.rows.chosen and message.rows.chosen != self.app.theme and not self.console_app.no_colours:
            self.app.theme = message.rows.chosen

    def action_keep(self) -> None:
        """The theme shown stays."""
        self.dismiss(None)
        self.console_app.say(f'to begin with it: theme = "{self.app.theme}" in console.toml')

    def action_drop(self) -> None:
        """The theme from before."""
        self.app.theme = self._before
        self.dismiss(None)

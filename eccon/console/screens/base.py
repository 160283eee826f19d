"""What every full screen has: header, footer, a name (the scope of actions), a size at which it gives up."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Click, Key, Resize
from textual.screen import Screen
from textual.widget import Widget

from eccon.console import actions
from eccon.console.draw.header import header, headers
from eccon.console.draw.keys import key_at, keys_line
from eccon.console.draw.shape import LEAST_HEIGHT, LEAST_WIDTH, Shape
from eccon.console.draw.text import Line, fit_line
from eccon.console.screens.steady import SteadySize
from eccon.console.widgets.lines import Lines
from eccon.model import ClusterState

if TYPE_CHECKING:
    from eccon.console.app import ConsoleApp

__all__ = ["ConsoleScreen", "bindings"]


def bindings(scope: str) -> list[BindingType]:
    """The keys of a screen, from the table of actions."""
    return [
        Binding(a.keys, f"app.act('{a.name}')", a.title, id=a.name, tooltip=a.tooltip, show=False)
        for a in actions.in_scope(scope)
    ]


class ConsoleScreen(SteadySize, Screen[None]):
    """A screen that draws itself from the app's state."""

    SCOPE: ClassVar[str] = ""
    AUTO_FOCUS = ""

    def __init__(self) -> None:
        super().__init__()
        self._early: list[Key] | None = []

    def keep(self, key: Key) -> bool:
        """Takes a key that came before the screen was drawn, to be acted on then; False when it is drawn."""
        if self._early is None:
            return False
        self._early.append(key)
        return True

    @property
    def console_app(self) -> "ConsoleApp":
        """The app, by its own type."""
        return cast("ConsoleApp", self.app)

    @property
    def state(self) -> ClusterState:
        """What is drawn."""
        return self.console_app.state

    def compose(self) -> ComposeResult:
        width, height = self.app.size
        self._mark(width, height, update=False)
        top = Lines(id="header")
        self._draw_header(top, width, height)  # so that the very first frame says what this is
        yield top
        with Vertical(id="body"):
            yield from self.body()
        yield Lines(id="footer")
        yield Lines(id="small")

    def body(self) -> Iterable[Widget]:
        """The widgets between header and footer."""
        return ()

    def refresh_body(self, now: float) -> None:
        """Draws the widgets between header and footer."""

    def marks(self, width: int, height: int) -> dict[str, bool]:  # noqa: ARG002  for those that have some
        """The classes that the styles know for what is shown at this size."""
        return {}

    def fit_size(self, width: int, height: int) -> None:
        """Sets heights for this size; called when the size changes."""

    def _mark(self, width: int, height: int, *, update: bool = True) -> None:
        """Sets all classes at once: each change alone has every style of the screen looked up again."""
        marks = {"-small": Shape(width, height).small, **self.marks(width, height)}
        changed = {name: on for name, on in marks.items() if on != self.has_class(name)}
        self.add_class(*(name for name, on in changed.items() if on), update=False)
        self.remove_class(*(name for name, on in changed.items() if not on), update=False)
        if changed and update:
            self.update_node_styles()

    def draw(self) -> None:
        """Draws everything from the state at hand."""
        if not self.is_mounted or not self.query("#footer"):
            return  # not there yet, or the app is closing
        if self.has_class("-small"):
            self._draw_small()
        else:
            self._draw_all()
        self.console_app.drawn()
        early, self._early = self._early, None
        for key in early or ():
            self.app.post_message(key)

    def _draw_all(self) -> None:
        width, height = self.size
        self._draw_header(self.query_one("#header", Lines), width, height)
        self.query_one("#footer", Lines).show([self.footer_line(width)])
        self.refresh_body(self.console_app.now())

    def _draw_header(self, top: Lines, width: int, height: int) -> None:
        app = self.console_app
        now, flag = app.now(), app.flag
        if Shape(width, height).header == 2 and self.SCOPE == "overview":
            top.styles.height = 2
            top.show(headers(app.state, width, now, app.lost, flag))
        else:
            top.styles.height = 1
            top.show([header(app.state, width, now, app.lost, flag)])

    def footer_line(self, width: int) -> Line:
        """A message while there is one, else the keys."""
        app = self.console_app
        if app.message:
            return fit_line([(" ", "text"), *app.message], width)
        return keys_line(self.footer_actions(), app.settings.keys, width)

    def on_click(self, event: Click) -> None:
        """A key that the footer names is pressed by the mouse too."""
        app = self.console_app
        if event.widget is None or event.widget.id != "footer" or app.message:
            return
        event.stop()
        if name := key_at(self.footer_actions(), app.settings.keys, self.size.width, event.x):
            app.act(name)

    def footer_actions(self) -> Iterable[actions.Action]:
        """What the footer names."""
        return self.console_app.offered(actions.footer(self.SCOPE))

    def _draw_small(self) -> None:
        if self.is_mounted and self.has_class("-small"):
            width, height = self.size
            text = f"too small: {width}x{height}, needs {LEAST_WIDTH}x{LEAST_HEIGHT}"
            self.query_one("#small", Lines).show([fit_line([(text, "warn")], width)])

    def on_resize(self, event: Resize) -> None:
        width, height = event.size
        self._mark(width, height)
        self.fit_size(width, height)
        self.call_after_refresh(self.draw)

    def on_screen_resume(self) -> None:
        self.call_after_refresh(self.draw)

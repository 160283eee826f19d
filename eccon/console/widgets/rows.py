"""A list with a cursor that stays on its row by identity, whatever moves around it."""

from collections.abc import Sequence
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp
from textual.message import Message

from eccon.console.draw.text import Line
from eccon.console.draw.window import Keyed, window
from eccon.console.widgets.lines import Lines

__all__ = ["Rows"]


class Rows(Lines, can_focus=True):
    """Heading and rows of (key, line); the chosen row is remembered by its key."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home,g", "end(0)", "first", show=False),
        Binding("end,G", "end(1)", "last", show=False),
    ]

    class Moved(Message):
        """Another row is chosen."""

        def __init__(self, rows: "Rows") -> None:
            super().__init__()
            self.rows = rows

    class Opened(Message):
        """A row was clicked twice."""

        def __init__(self, rows: "Rows") -> None:
            super().__init__()
            self.rows = rows

    def __init__(
        self, empty: str = "", *, sticky_top: bool = False, document: bool = False, **kwargs: Any
    ) -> None:
        """What is shown without rows, and how the keys move.

        Args:
            sticky_top: without a move of the user the first row stays chosen, as new ones come in.
            document: rows are read and not chosen: no cursor, the keys scroll.
        """
        super().__init__(**kwargs)
        self.chosen: str | None = None
        self.first = 0
        self._heading: Line = []
        self._rows: list[Keyed] = []
        self._empty = empty
        self._sticky = sticky_top
        self._at_top = True
        self._document = document

    @property
    def keys(self) -> list[str]:
        """Keys of the rows, from the top."""
        return [key for key, _ in self._rows]

    def put(self, heading: Line, rows: Sequence[Keyed], empty: str | None = None) -> None:
        """Shows these rows (a line, or how to draw it when it is seen); the chosen one stays chosen."""
        before = self._index()
        self._heading, self._rows = heading, list(rows)
        if empty is not None:
            self._empty = empty
        keys = self.keys
        if self._sticky and self._at_top:
            self.chosen = keys[0] if keys else None
        elif self.chosen not in keys:
            self.chosen = keys[min(max(before, 0), len(keys) - 1)] if keys else None
        elif self._sticky and self._index() >= 0 and before >= 0:
            self.first = max(0, self.first + self._index() - before)
        self.draw()

    def draw(self) -> None:
        """Lines of the window on the rows."""
        width = self.size.width
        room = max(self.size.height - (1 if self._heading else 0), 1)
        index = self._index()
        last = max(0, len(self._rows) - room)
        self.first = min(max(self.first, 0), last)
        lines = window(self._heading, self._rows, self.first, width, self.size.height, self._empty)
        cursor = index - self.first + (1 if self._heading else 0)
        shown = self.has_focus and not self._document and self.first <= index < self.first + room
        self.show(lines, cursor if shown else -1)

    def choose(self, key: str) -> None:
        """Chooses a row and scrolls it into the window."""
        self.chosen = key
        self._at_top = self._index() <= 0
        self._reveal()

    def _index(self) -> int:
        return next((i for i, (key, _) in enumerate(self._rows) if key == self.chosen), -1)

    def _reveal(self) -> None:
        room = max(self.size.height - (1 if self._heading else 0), 1)
        index = self._index()
        self.first = min(max(self.first, index - room + 1), max(index, 0))
        self.draw()
        self.post_message(self.Moved(self))

    def _go(self, index: int) -> None:
        if self._rows:
            index = min(max(index, 0), len(self._rows) - 1)
            self._at_top = index == 0
            self.chosen = self._rows[index][0]
            self._reveal()

    def action_move(self, by: int) -> None:
        """Up or down by rows."""
        self._by(by)

    def action_page(self, by: int) -> None:
        """Up or down by windows."""
        self._by(by * max(self.size.height - 2, 1))

    def action_end(self, last: int) -> None:
        """To the first or the last row."""
        if self._document:
            self._by(len(self._rows) if last else -len(self._rows))
        else:
            self._go(len(self._rows) - 1 if last else 0)

    def _by(self, rows: int) -> None:
        if self._document:
            self.first += rows
            self.draw()
        else:
            self._go(self._index() + rows)

    def on_focus(self) -> None:
        self.draw()

    def on_blur(self) -> None:
        self.draw()

    def on_resize(self) -> None:
        self.draw()

    def on_click(self, event: Click) -> None:
        self._go(self.first + event.y - (1 if self._heading else 0))
        if event.chain == 2:
            self.post_message(self.Opened(self))

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        event.stop()
        self.first += 3
        self.draw()

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        event.stop()
        self.first -= 3
        self.draw()

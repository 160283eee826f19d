"""The way of a frame's changed lines to the terminal past Textual's compositor.

The compositor asks every widget for its part of each line, in strips that know where the mouse is; for a
table whose figures change each second this takes longer than all the rest of a frame. Where nothing lies over
the widgets and nothing moves, a line's cells are known, and the painter alone is enough.
"""

from typing import Any

from textual.errors import NoWidget
from textual.screen import Screen

from eccon.console.paint import Painter, Piece
from eccon.console.widgets.lines import Lines

__all__ = ["Shortcut"]


class Shortcut:
    """Takes lines while it is open; what it cannot place goes the long way."""

    def __init__(self) -> None:
        self._waiting: dict[Lines, set[int]] | None = None

    def open(self) -> None:
        """From here on lines are taken, until the frame is drawn."""
        self._waiting = {}

    def take(self, widget: Lines, lines: set[int]) -> bool:
        """Takes changed lines of a widget; False when it is closed, or they are drawn in another way."""
        if self._waiting is None or type(widget).render_line is not Lines.render_line:
            return False
        self._waiting.setdefault(widget, set()).update(lines)
        return True

    def close(self, screen: Screen[Any], painter: Painter) -> str:
        """The bytes of all that was taken; where something moves, that is the compositor's."""
        waiting, self._waiting = self._waiting, None
        if not waiting:
            return ""
        if _moves(screen):
            for widget, lines in waiting.items():
                widget.repaint(lines)
            return ""
        pieces: list[Piece] = []
        for widget, lines in waiting.items():
            found = None if widget.mouse_marked else _placed(screen, widget, lines, painter)
            if found is None:
                widget.repaint(lines)
            else:
                pieces += found
        return painter.draw(pieces)


def _moves(screen: Screen[Any]) -> bool:
    """Whether a widget has another size or place as soon as the layout is looked at."""
    return screen._layout_required or any(w._layout_required for w in screen._compositor.full_map)


def _placed(screen: Screen[Any], widget: Lines, lines: set[int], painter: Painter) -> list[Piece] | None:
    """The cells of these lines and where they are; None where a part of the widget is not seen."""
    try:
        place = screen.find_widget(widget)
    except NoWidget:
        return None
    region = place.region
    if not place.clip.contains_region(region) or region.size != widget.size:
        return None
    seen = [y for y in sorted(lines) if y < region.height]
    widget.outdate(seen, region.width)
    return [(region.y + y, region.x, widget.cells(y, region.width, painter)) for y in seen]

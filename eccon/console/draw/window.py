"""A window on rows: its heading says how many lie beyond its edges."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from eccon.console.draw.text import Line, cell_len, fit_line, line_width, plain

__all__ = ["Keyed", "window"]

Keyed: TypeAlias = tuple[str, Line | Callable[[], Line]]
"""The key of a row, and its line or how to draw it when it is seen."""


def window(
    heading: Line, rows: Sequence[Keyed], first: int, width: int, height: int, empty: str = ""
) -> list[Line]:
    """The lines of a window whose uppermost row is number `first`."""
    room = max(height - (1 if heading else 0), 1)
    seen = (line() if callable(line) else line for _, line in rows[first : first + room])
    lines = [fit_line(line, width) for line in seen]
    if heading:
        lines.insert(0, _head(heading, first, len(rows) - first - room, width))
    if not rows and empty:
        lines.append([(" " + empty, "dim")])
    return lines


def _head(heading: Line, above: int, below: int, width: int) -> Line:
    hint = (f" ↑{above}" if above > 0 else "") + (f" ↓{below}" if below > 0 else "")
    if not hint:
        return fit_line(heading, width, "head")
    free = width - len(plain(heading).rstrip()) - 1
    arrows = hint[1:2] + ("↓" if "↓" in hint[2:] else "")
    if cell_len(hint) > free >= cell_len(arrows):  # a heading is worth more than how many there are
        hint = arrows
    tail: Line = [(hint + " ", "accent")]
    return [*fit_line(heading, width - line_width(tail), "head"), *tail]

"""Columns of fixed width that appear by rank as the terminal gets wider: figures never jump."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from eccon.console.draw.text import Line, Part, clean, fit

__all__ = ["Column", "choose", "heading", "row"]

T = TypeVar("T")


class Column(msgspec.Struct, Generic[T], frozen=True):
    """One column. `rank` 0 is always there; the higher, the wider the terminal must be."""

    key: str
    heading: str
    width: int
    rank: int
    cell: Callable[[T], Part]
    right: bool = False


def choose(columns: Sequence[Column[T]], width: int) -> list[Column[T]]:
    """The columns that fit in `width` with one space between, by rank, in their order."""
    used = -1
    taken: set[str] = set()
    for column in sorted(columns, key=lambda c: c.rank):
        if used + 1 + column.width > width:
            if column.rank:
                break
            continue
        taken.add(column.key)
        used += 1 + column.width
    return [c for c in columns if c.key in taken]


def heading(columns: Sequence[Column[T]]) -> Line:
    """The line of headings."""
    line: Line = []
    for i, column in enumerate(columns):
        if i:
            line.append((" ", "head"))
        line.append((fit(column.heading, column.width, column.right), "head"))
    return line


def row(columns: Sequence[Column[T]], item: T) -> Line:
    """One line of cells."""
    line: Line = []
    for i, column in enumerate(columns):
        if i:
            line.append((" ", "text"))
        text, tone = column.cell(item)
        line.append((fit(clean(text), column.width, column.right), tone))
    return line

"""The cells of pictures, as characters: so a picture is laid out, clipped and covered as any text is.

A cell is one character of Unicode's last private plane that says which picture (slot) it is of, and where
in it. No text from outside keeps such a character (see `draw.text.clean`); the painter turns them into what
the terminal's protocol wants.
"""

__all__ = ["COLUMNS_MAX", "ROWS_MAX", "SLOTS", "is_cell", "line", "place"]

COLUMNS_MAX = 32
ROWS_MAX = 16
SLOTS = 64

FIRST = 0x100000
LAST = FIRST + SLOTS * ROWS_MAX * COLUMNS_MAX - 1


def is_cell(text: str) -> bool:
    """Whether a cell of the screen is one of a picture."""
    return len(text) == 1 and FIRST <= ord(text) <= LAST


def place(cell: str) -> tuple[int, int, int]:
    """Slot, row and column of a picture's cell."""
    rest, column = divmod(ord(cell) - FIRST, COLUMNS_MAX)
    slot, row = divmod(rest, ROWS_MAX)
    return slot, row, column


def line(slot: int, row: int, columns: int) -> str:
    """The cells of one row of a picture."""
    start = FIRST + (slot * ROWS_MAX + row) * COLUMNS_MAX
    return "".join(map(chr, range(start, start + columns)))

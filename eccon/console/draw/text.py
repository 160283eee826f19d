"""lines of tones, and text from outside made safe for a terminal's grid.

A line is a list of parts; a part is its text and the name of a style tone of the theme. What
comes from outside passes `clean` first: no control or escape character survives it.
"""

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

from rich.cells import cell_len as rich_cell_len
from rich.cells import chop_cells

__all__ = [
    "Line",
    "Part",
    "cell_len",
    "clean",
    "clean_lines",
    "fit",
    "fit_line",
    "line_width",
    "plain",
    "wrap",
]

Part: TypeAlias = tuple[str, str]
Line: TypeAlias = list[Part]

ELLIPSIS = "…"

# Zero-width joiners, variation selectors, directional overrides, tags: terminals disagree about
# their width or let them reorder a line, so they go. The rest of what is invisible becomes visible.
_VANISH = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e01ef]")
# The last private plane stands for cells of pictures, here and in terminals.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\U00100000-\U0010ffff]")
_SKIN = re.compile("[\U0001f3fb-\U0001f3ff]")


def cell_len(text: str) -> int:
    """Cells that a clean text takes."""
    return len(text) if text.isascii() else rich_cell_len(text)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if 0xD800 <= code <= 0xDFFF or code >= 0x100000:
        return "�"
    return "␤" if code >= 0x2028 else "␦"


@lru_cache(4096)
def clean(text: str) -> str:
    """`text` on one line with every control character replaced by a visible sign; tabs are spaces."""
    if text.isascii() and text.isprintable():
        return text
    text = unicodedata.normalize("NFC", text.replace("\t", "    "))
    text = _SKIN.sub("", _VANISH.sub("", text))
    return _UNSAFE.sub(_visible, text)


def clean_lines(text: str) -> list[str]:
    """`text` as cleaned lines, cut at line ends of every kind."""
    return [clean(line) for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]


@lru_cache(8192)
def fit(text: str, width: int, right: bool = False) -> str:
    """`text` in exactly `width` cells: cut on a cell's edge with an ellipsis, or padded."""
    if width <= 0:
        return ""
    length = cell_len(text)
    if length > width:
        text = "".join(chop_cells(text, width - 1)[:1]) + ELLIPSIS if width > 1 else ELLIPSIS
        length = cell_len(text)
    pad = " " * (width - length)
    return pad + text if right else text + pad


def line_width(line: Iterable[Part]) -> int:
    """Cells of a line."""
    return sum(cell_len(text) for text, _ in line)


def fit_line(line: Line, width: int, fill: str = "text") -> Line:
    """`line` in exactly `width` cells: the part that passes the edge is cut, the rest dropped."""
    out: Line = []
    room = width
    for text, tone in line:
        length = cell_len(text)
        if length > room:
            if room > 0:
                out.append((fit(text, room), tone))
            return out
        out.append((text, tone))
        room -= length
    if room > 0:
        out.append((" " * room, fill))
    return out


def plain(line: Iterable[Part]) -> str:
    """The text of a line without its tokens."""
    return "".join(text for text, _ in line)


def wrap(text: str, width: int) -> list[str]:
    """`text` (one clean line) in pieces of at most `width` cells, cut at spaces where there are some."""
    if width <= 0:
        return []
    pieces: list[str] = []
    while cell_len(text) > width:
        head = chop_cells(text, width)[0] or text[:1]
        cut = head.rfind(" ")
        if cut > width // 2:
            head = head[: cut + 1]
        pieces.append(head.rstrip(" "))
        text = text[len(head) :]
    return [*pieces, text]

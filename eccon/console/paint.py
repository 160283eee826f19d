"""Sends the terminal only the cells that differ from what it already shows.

Textual repaints regions, and from the left edge of a widget on; a figure that changed at the end of
a line costs the line. `Painter` keeps what was sent and writes runs of changed cells instead.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.segment import Segment
from rich.style import Style

if TYPE_CHECKING:
    from textual._compositor import ChopsUpdate, LayoutUpdate
    from textual.strip import Strip

    from eccon.console.pictures.easel import Easel

__all__ = ["Cell", "Codes", "Painter", "Piece", "add_cells"]

Codes: TypeAlias = tuple[str, str, str]
"""Attributes, foreground, background, as SGR parameters."""

Cell: TypeAlias = tuple[str, Codes]
"""A character with the zero-width ones after it; the right half of a wide one is ""."""

Piece: TypeAlias = tuple[int, int, list[Cell]]
"""Line, column, and the cells from there on."""

GAP = 4
"""Unchanged cells that cost less to send again than to jump over (a jump is about 7 bytes)."""

PLAIN: Codes = ("", "39", "49")
BLANK: Cell = (" ", PLAIN)
UNKNOWN: Cell = ("\0", PLAIN)

_ATTRIBUTES = (
    ("bold", "1"),
    ("dim", "2"),
    ("italic", "3"),
    ("underline", "4"),
    ("blink", "5"),
    ("reverse", "7"),
    ("strike", "9"),
)


@lru_cache(4096)
def _codes(style: Style | None, system: ColorSystem) -> Codes:
    if style is None:
        return PLAIN
    attributes = ";".join(code for name, code in _ATTRIBUTES if getattr(style, name))
    fg = bg = None
    if style.color is not None:
        fg = ";".join(style.color.downgrade(system).get_ansi_codes(foreground=True))
    if style.bgcolor is not None:
        bg = ";".join(style.bgcolor.downgrade(system).get_ansi_codes(foreground=False))
    return attributes, fg or "39", bg or "49"


def add_cells(cells: list[Cell], text: str, codes: Codes) -> None:
    """Appends the cells of a text; what has no width belongs to the cell before."""
    if text.isascii():
        cells += [(c, codes) for c in text]
        return
    for c in text:
        width = cell_len(c)
        if width == 0 and cells:
            i = -2 if not cells[-1][0] and len(cells) > 1 else -1
            cells[i] = (cells[i][0] + c, cells[i][1])
        elif width:
            cells.append((c, codes))
            if width == 2:
                cells.append(("", codes))


class Painter:
    """The cells on the screen, and the bytes that turn them into others."""

    def __init__(self, system: ColorSystem = ColorSystem.TRUECOLOR) -> None:
        self.system = system
        self.easel: Easel | None = None
        """Who knows the cells of pictures, once there are some."""
        self._screen: list[list[Cell]] = []
        self._width = 0

    def forget(self) -> None:
        """The terminal shows something else now (resized, resumed): everything is sent again."""
        self._screen = []

    def resize(self, width: int, height: int) -> None:
        """Fits the memory to the terminal's size; a new size forgets everything."""
        if width != self._width or height != len(self._screen):
            self._width = width
            self._screen = [[UNKNOWN] * width for _ in range(height)]

    def paint(self, update: "LayoutUpdate | ChopsUpdate") -> str:
        """The bytes for an update of Textual's compositor; empty when nothing differs."""
        from textual._compositor import LayoutUpdate  # noqa: PLC0415  the first frame is drawn without Textual

        if isinstance(update, LayoutUpdate):
            x, y = update.region.offset
            return self.draw((y + n, x, self._cells(strips)) for n, strips in enumerate(update.strips))
        return self.draw(self._changed(update))

    def draw(self, pieces: Iterable[Piece]) -> str:
        """The bytes for pieces of lines; empty when nothing differs."""
        out: list[str] = []
        pen: list[Codes | None] = [None]
        if self.easel is not None:
            self.easel.begin(self._screen, UNKNOWN)
        for y, x, cells in pieces:
            self._line(y, x, cells, out, pen)
        if out:
            out.append("\x1b[m")
        if self.easel is not None:
            out = self.easel.end(out, self._screen)
        return "".join(out)

    def cells(self, segments: Iterable[Segment]) -> list[Cell]:
        """The cells of a piece of a line."""
        return self._cells([segments])

    def codes(self, style: Style | None) -> Codes:
        """A style as this terminal shows it."""
        return _codes(style, self.system)

    def _changed(self, update: "ChopsUpdate") -> Iterator[Piece]:
        for y, x1, x2 in update.spans:
            if y >= len(update.chops):
                continue
            ends = update.chop_ends[y]
            for end, (x, strip) in zip(ends, update.chops[y].items(), strict=False):
                if strip is None or x >= x2 or end <= x1:
                    continue
                left, right = max(x, x1), min(end, x2)
                yield y, left, self._cells([strip.crop(left - x, right - x)])

    def _cells(self, strips: "Iterable[Strip | Iterable[Segment]]") -> list[Cell]:
        cells: list[Cell] = []
        for strip in strips:
            for text, style, control in strip:
                if not control:
                    add_cells(cells, text, _codes(style, self.system))
        return cells

    def _line(self, y: int, x: int, cells: list[Cell], out: list[str], pen: list[Codes | None]) -> None:
        if y >= len(self._screen) or x >= self._width:
            return
        shown = self._screen[y]
        cells = cells[: self._width - x]
        if shown[x : x + len(cells)] == cells:
            return
        for start, stop in self._runs(shown, x, cells):
            out.append(f"\x1b[{y + 1};{x + start + 1}H")
            run: Sequence[Cell] = cells[start:stop]
            if self.easel is not None:
                run = self.easel.filled(run, y, x + start)
            self._write(run, out, pen)
        shown[x : x + len(cells)] = cells

    @staticmethod
    def _runs(shown: Sequence[Cell], x: int, cells: Sequence[Cell]) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for i, cell in enumerate(cells):
            if shown[x + i] == cell:
                continue
            start, stop = i, i + 1
            while start > 0 and not cells[start][0]:  # never begin in the middle of a wide character
                start -= 1
            while stop < len(cells) and not cells[stop][0]:
                stop += 1
            if runs and start - runs[-1][1] <= GAP:
                runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
            else:
                runs.append((start, stop))
        return runs

    @staticmethod
    def _write(cells: Sequence[Cell], out: list[str], pen: list[Codes | None]) -> None:
        for text, codes in cells:
            old = pen[0]
            if codes != old:
                if old is None or codes[0] != old[0]:
                    out.append(f"\x1b[{';'.join(('0', *(c for c in codes if c and c not in ('39', '49'))))}m")
                else:
                    changed = [new for new, was in zip(codes[1:], old[1:], strict=True) if new != was]
                    out.append(f"\x1b[{';'.join(changed)}m")
                pen[0] = codes
            out.append(text)

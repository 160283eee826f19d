"""Between the painter, who knows cells, and the gallery, which knows pictures."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eccon.console.pictures import cells
from eccon.console.pictures.gallery import Gallery

if TYPE_CHECKING:
    from eccon.console.paint import Cell

__all__ = ["Easel"]


class Easel:
    """Turns the cells of pictures into what the terminal is sent of them, frame by frame."""

    def __init__(self, gallery: Gallery) -> None:
        self.gallery = gallery
        self._touched: dict[tuple[int, int, int], None] = {}
        """Pictures with a cell that is written in this frame: slot, and where its upper left one is."""

    def begin(self, screen: Sequence[list["Cell"]], unknown: "Cell") -> None:
        """Forgets what the screen shows in cells that are another picture's since the last frame."""
        if not self.gallery.changed:
            return
        for line in screen:
            for x, (text, _) in enumerate(line):
                if cells.is_cell(text) and cells.place(text)[0] in self.gallery.changed:
                    line[x] = unknown
        self.gallery.changed.clear()

    def filled(self, run: Sequence["Cell"], y: int, x: int) -> Sequence["Cell"]:
        """A run of cells that is about to be written, with what stands in those of pictures."""
        if self.gallery.empty and not any(cells.is_cell(text) for text, _ in run):
            return run
        out: list[Cell] = []
        for at, (text, codes) in enumerate(run, x):
            if cells.is_cell(text):
                slot, row, column = cells.place(text)
                self._touched[slot, y - row, at - column] = None
                shown, colour = self.gallery.cell(text)
                out.append((shown, (codes[0], colour or codes[1], codes[2])))
            else:
                out.append((text, codes))
        return out

    def end(self, out: list[str], screen: Sequence[Sequence["Cell"]]) -> list[str]:
        """The frame: what has to come before its cells, these, and what is drawn over them."""
        if not self._touched:
            return out
        before = [self.gallery.sending(slot) for slot, _, _ in self._touched]
        after = [self._drawn(screen, *place) for place in self._touched]
        self._touched.clear()
        return before + out + after

    def _drawn(self, screen: Sequence[Sequence["Cell"]], slot: int, y: int, x: int) -> str:
        """A picture that lies over its cells: drawn when all of them are seen, else it would cover others."""
        picture = self.gallery.drawn(slot)
        if picture is None or y < 0 or x < 0:
            return ""
        lines = [line[x : x + picture.columns] for line in screen[y : y + picture.rows]]
        seen = ["".join(text for text, _ in line) for line in lines] == picture.lines()
        return f"\x1b[{y + 1};{x + 1}H{picture.data}" if seen else ""

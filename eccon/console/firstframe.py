"""The overview as a terminal's cells, without Textual: what its widgets show of the same state."""

from collections.abc import Iterator, Sequence

from rich.segment import Segment
from rich.style import Style

from eccon.console import plainer
from eccon.console.draw.glance import Block
from eccon.console.draw.text import Line, cell_len, fit
from eccon.console.paint import Painter
from eccon.console.setup import Setup
from eccon.console.themes import Palette, colour

__all__ = ["paint"]


def paint(blocks: Sequence[Block], setup: Setup, painter: Painter, *, boxed: bool) -> str:
    """The bytes that draw these blocks; the painter remembers what is shown."""
    frame = _Frame(setup, boxed=boxed)
    return painter.draw(
        (y, block.x, painter.cells(frame.plainer(segments)))
        for block in blocks
        for y, segments in enumerate(frame.rows(block), block.y)
    )


class _Frame:
    """The styles of one theme."""

    def __init__(self, setup: Setup, *, boxed: bool) -> None:
        self._theme = setup.themes[setup.theme]
        self._palette = Palette(self._theme)
        self._setup = setup
        self._boxed = boxed

    def plainer(self, segments: Iterator[Segment]) -> Iterator[Segment]:
        """Without colours, or in ASCII, where that is asked for; faint text in a colour of its own."""
        for text, style, _ in segments:
            shown = style or Style()
            if self._setup.no_colours:
                shown = plainer.without_colours(shown)
            elif shown.dim and not self._theme.ansi:
                shown = plainer.blended(shown)
            yield Segment(plainer.to_ascii(text) if self._setup.ascii_only else text, shown)

    def rows(self, block: Block) -> Iterator[Iterator[Segment]]:
        """Each line of a block, over its whole width."""
        base = self._style("text", block.ground)
        if not block.lines and not block.title:
            base = Style(bgcolor=base.bgcolor)
        if not block.title:
            for y in range(block.height):
                yield self._line(block.lines[y] if y < len(block.lines) else [], block.width, base)
            return
        edge = self._style("dim" if block.chosen and self._boxed else "faint", block.ground)
        title = self._style("accent" if block.chosen else "dim", block.ground) + Style(bold=True)
        yield self._top(block, edge, title)
        inner = block.height - (2 if self._boxed else 1)
        for y in range(inner):
            line = block.lines[y] if y < len(block.lines) else []
            style = self._palette.cursor if y == block.cursor else None
            if self._boxed:
                yield self._between(self._line(line, block.width - 2, base, style), edge)
            else:
                yield self._line(line, block.width, base, style)
        if self._boxed:
            yield iter([Segment(f"╰{'─' * (block.width - 2)}╯", edge)])

    def _style(self, name: str, ground: str) -> Style:
        colours = self._theme.colours
        return Style(color=colour(getattr(colours, name)), bgcolor=colour(getattr(colours, ground)))

    def _top(self, block: Block, edge: Style, title: Style) -> Iterator[Segment]:
        room = block.width - (6 if self._boxed else 0)
        text = fit(block.title, min(room, cell_len(block.title)))
        if self._boxed:
            text = f" {text} "
        before = "╭─" if self._boxed else "─"
        after = "╮" if self._boxed else ""
        rest = block.width - len(before) - cell_len(text) - len(after)
        yield Segment(before, edge)
        yield Segment(text, title)
        yield Segment("─" * rest + after, edge)

    @staticmethod
    def _between(line: Iterator[Segment], edge: Style) -> Iterator[Segment]:
        yield Segment("│", edge)
        yield from line
        yield Segment("│", edge)

    def _line(self, line: Line, width: int, base: Style, over: Style | None = None) -> Iterator[Segment]:
        room = width
        for text, tone in [*line, (" " * width, "")]:
            if room <= 0:
                return
            shown = text if cell_len(text) <= room else fit(text, room) if tone else text[:room]
            style = base + self._palette[tone] if tone else base
            yield Segment(shown, style + over if over is not None else style)
            room -= cell_len(shown)

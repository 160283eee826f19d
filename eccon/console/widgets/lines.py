"""A widget of lines that repaints only those that changed."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from eccon.console.draw.text import Line, cell_len, plain
from eccon.console.paint import Cell, Codes, Painter, add_cells
from eccon.console.plainer import to_ascii

if TYPE_CHECKING:
    from eccon.console.app import ConsoleApp
    from eccon.console.shortcut import Shortcut
    from eccon.console.themes import Palette

__all__ = ["Lines"]

PENS_MAX = 4096
"""Styles kept by a widget: what a screenful of it has, several times over."""


class Lines(Widget):
    """Draws what `show` was last given; lines equal to the old ones cost nothing."""

    DEFAULT_CSS = "Lines { height: 1; width: 1fr; }"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._lines: list[Line] = []
        self._cursor = -1
        self._base: Style | None = None
        """The widget's own style; None when it has to be looked up again."""
        self._palette: Palette | None = None
        self._faded = False
        self._pens: dict[tuple[str, int, int], Style] = {}
        self._codes: dict[tuple[str, bool], Codes] = {}

    @property
    def console_app(self) -> "ConsoleApp":
        """The app, by its own type."""
        return cast("ConsoleApp", self.app)

    @property
    def text(self) -> str:
        """What is shown, without styles."""
        return "\n".join(plain(line) for line in self._lines)

    def show(self, lines: Sequence[Line], cursor: int = -1) -> None:
        """Shows these lines from the top; the one at index `cursor` is the chosen one."""
        old, was = self._lines, self._cursor
        self._lines, self._cursor = list(lines), cursor
        changed = {y for y, (a, b) in enumerate(zip(old, lines, strict=False)) if a != b}
        changed.update(range(min(len(old), len(lines)), max(len(old), len(lines))))
        if cursor != was:
            changed.update(y for y in (cursor, was) if y >= 0)
        shortcut: Shortcut | None = getattr(self.app, "shortcut", None)
        if changed and (shortcut is None or not shortcut.take(self, changed)):
            self.repaint(changed)

    def repaint(self, lines: Iterable[int]) -> None:
        """Has these lines painted anew, by the compositor."""
        width = self.size.width
        self.refresh(*(Region(0, y, width, 1) for y in lines))

    def outdate(self, lines: Iterable[int], width: int) -> None:
        """Textual is to ask for these lines again when it next wants them; the terminal has them already."""
        self._styles_cache.set_dirty(*(Region(0, y, width, 1) for y in lines))

    @property
    def mouse_marked(self) -> bool:
        """Whether the mouse has marked something in it."""
        return self.text_selection is not None

    def cells(self, y: int, width: int, painter: Painter) -> list[Cell]:
        """A line as the terminal has it, over the whole width: `render_line` after Textual's filters."""
        self._look()
        chosen = y == self._cursor
        cells: list[Cell] = []
        in_ascii = self.console_app.ascii_only
        for text, tone in self._lines[y] if y < len(self._lines) else ():
            add_cells(cells, to_ascii(text) if in_ascii else text, self._inks(tone, chosen, painter))
        blank = (" ", self._inks("", chosen, painter))
        if len(cells) > width:
            cut = not cells[width][0]
            del cells[width:]
            if cut and cells:
                cells[-1] = (" ", cells[-1][1])  # half of a wide character
        cells += [blank] * (width - len(cells))
        return cells

    def _inks(self, tone: str, chosen: bool, painter: Painter) -> Codes:
        """What the terminal is sent for a tone."""
        ink = self._codes.get((tone, chosen))
        if ink is None:
            base, palette = self._look()
            style = base + palette[self._tone(tone)] if tone else base
            segments = [Segment("x", style + palette.cursor if chosen else style)]
            for one in self.app.get_line_filters():
                segments = one.apply(segments, self.background_colors[1])
            ink = self._codes[tone, chosen] = painter.codes(segments[0].style)
        return ink

    def _tone(self, tone: str) -> str:
        return "dim" if self._faded and tone not in ("bad", "key") else tone

    def _look(self) -> "tuple[Style, Palette]":
        """The widget's own style, looked up again where it may be another, and those of the tones."""
        app = self.console_app
        base, palette = self._base, app.palette
        if base is None or self._palette is not palette or self._faded != app.faded:
            base = self._base = self.rich_style
            self._palette, self._faded = palette, app.faded
            self._pens.clear()
            self._codes.clear()
        return base, palette

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base, palette = self._look()
        if y >= len(self._lines):
            return Strip.blank(width, base)
        segments = []
        at = cells = 0
        for text, tone in self._lines[y]:
            segments.append(Segment(text, self._pen(tone, at, y)))
            at += len(text)
            cells += cell_len(text)
        if cells < width:
            segments.append(Segment(" " * (width - cells), self._pen("", at, y)))
        strip = Strip(segments).adjust_cell_length(width, base)
        if y == self._cursor:
            strip = Strip([Segment(t, (s or base) + palette.cursor, c) for t, s, c in strip], width)
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(y)) is not None:
            strip = self._selected(strip, span).apply_offsets(0, y)
        return strip

    def notify_style_update(self) -> None:
        self._base = None
        super().notify_style_update()

    def _pen(self, tone: str, x: int, y: int) -> Style:
        """The style of a tone ("": the widget's own), with the place in it by which the mouse finds the text.

        A frame asks for thousands of them, and nearly all are those of the frame before.
        """
        pen = self._pens.get((tone, x, y))
        if pen is None:
            if len(self._pens) >= PENS_MAX:
                self._pens.clear()
            base, palette = self._look()
            pen = (base + palette[self._tone(tone)] if tone else base) + Style.from_meta({"offset": (x, y)})
            self._pens[tone, x, y] = pen
        return pen

    def _selected(self, strip: Strip, span: tuple[int, int]) -> Strip:
        start, end = span
        text = strip.text
        stop = len(text) if end == -1 else end
        left = cell_len(text[:start])
        right = cell_len(text[:stop])
        style: Style = self.screen.get_component_rich_style("screen--selection")
        parts = list(strip.divide([left, right, strip.cell_length]))
        return Strip.join(
            [parts[0], Strip([Segment(t, (s or style) + style, c) for t, s, c in parts[1]]), *parts[2:]]
        )

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """What the mouse marked, as text; trailing blanks are layout and stay behind."""
        text = selection.extract("\n".join(plain(line).rstrip() for line in self._lines))
        return text, "\n"

    def selection_updated(self, selection: Selection | None) -> None:  # noqa: ARG002  Textual's signature
        self.refresh()

"""A window on a log that grows: follow or stay, fold or cut, search, levels. Keeps a bounded past."""

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.events import MouseScrollDown, MouseScrollUp

from eccon.console.draw.text import Line, fit_line, plain, wrap
from eccon.console.logtext import level_of, parse
from eccon.console.widgets.lines import Lines

__all__ = ["KEPT", "LogView", "pattern_of"]

KEPT = 20_000
"""Lines kept; older ones are asked for again when wanted."""


def pattern_of(words: str) -> re.Pattern[str] | None:
    """The pattern of a search: `/…/` is a regular expression, all else is literal. Raises re.error."""
    if not words:
        return None
    if len(words) > 2 and words.startswith("/") and words.endswith("/"):
        return re.compile(words[1:-1], re.IGNORECASE)
    return re.compile(re.escape(words), re.IGNORECASE)


class LogView(Lines, can_focus=True):
    """Lines of a log. `top` is the first line shown, None while it follows the end."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll(-1)", "up", show=False),
        Binding("down,j", "scroll(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home,g", "first", "first", show=False),
        Binding("end,G", "follow", "follow", show=False),
        Binding("left", "side(-8)", "left", show=False),
        Binding("right", "side(8)", "right", show=False),
    ]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.top: int | None = None
        self.folded = False
        self.left = 0
        self.least = 0
        self.pattern: re.Pattern[str] | None = None
        self.found: int | None = None
        self.dropped = 0
        """Lines that fell off the front."""
        self._kept: list[tuple[str, int]] = []
        self._shown: list[int] | None = None

    @property
    def lines_kept(self) -> list[str]:
        """The raw lines at hand."""
        return [text for text, _ in self._kept]

    def clear(self) -> None:
        """Forgets all lines."""
        self._kept.clear()
        self._shown = None
        self.dropped = 0
        self.top = self.found = None

    def add(self, lines: Sequence[str]) -> None:
        """Appends lines. A line without a level continues the one before (a traceback)."""
        before = self._kept[-1][1] if self._kept else 0
        for text in lines:
            rank = level_of(text)
            if rank == 0 and text[:1] in (" ", "\t", "^"):
                rank = before
            before = rank
            self._kept.append((text, rank))
        if (over := len(self._kept) - KEPT) > 0:
            del self._kept[:over]
            self.dropped += over
            if self.top is not None:
                self.top = max(0, self.top - over)
            self.found = None if self.found is None or self.found < over else self.found - over
        self._shown = None
        self.draw()

    def set_level(self, least: int) -> None:
        """Shows only lines of at least this rank."""
        self.least = least
        self._shown = None
        self.top = None
        self.draw()

    def indices(self) -> list[int]:
        """Positions of the lines that pass the level."""
        if self._shown is None:
            self._shown = [i for i, (_, rank) in enumerate(self._kept) if rank >= self.least]
        return self._shown

    def draw(self) -> None:
        """The window's lines: from `top` down, or the end of the log."""
        width, height = self.size
        if not width or not height:
            return
        shown = self.indices()
        lines: list[Line] = []
        if self.top is None:
            for i in reversed(shown[-height:]):
                lines[:0] = self._folded(i, width)
                if len(lines) >= height:
                    break
            lines = lines[-height:]
        else:
            for i in shown[self._at(self.top) :][:height]:
                lines += self._folded(i, width)
                if len(lines) >= height:
                    break
        self.show(lines[:height])

    def _at(self, index: int) -> int:
        shown = self.indices()
        return next((n for n, i in enumerate(shown) if i >= index), max(0, len(shown) - 1))

    def _folded(self, i: int, width: int) -> list[Line]:
        line = parse(self._kept[i][0])
        if self.pattern is not None:
            line = _marked(line, self.pattern, chosen=i == self.found)
        if not self.folded:
            return [fit_line(_skip(line, self.left), width)]
        pieces = wrap(plain(line), width)
        return [fit_line(piece, width) for piece in _split(line, [len(p) for p in pieces])] or [[]]

    def action_scroll(self, by: int) -> None:
        """Up or down by lines; reaching the end follows again."""
        shown = self.indices()
        room = max(self.size.height, 1)
        at = max(0, len(shown) - room) if self.top is None else self._at(self.top)
        at = max(0, at + by)
        follows = at >= len(shown) - room and by > 0
        self.top = None if follows or not shown else shown[min(at, len(shown) - 1)]
        self.draw()

    def action_page(self, by: int) -> None:
        """Up or down by windows."""
        self.action_scroll(by * max(self.size.height - 1, 1))

    def action_first(self) -> None:
        """To the first line at hand."""
        self.top = 0
        self.draw()

    def action_follow(self) -> None:
        """To the end, and along with it."""
        self.top = None
        self.draw()

    def action_side(self, by: int) -> None:
        """Left or right on cut lines."""
        self.left = max(0, self.left + by)
        self.draw()

    def hold(self) -> None:
        """Stays where it is."""
        shown = self.indices()
        if shown:
            self.top = shown[max(0, len(shown) - max(self.size.height, 1))]

    def find(self, step: int) -> tuple[int, int]:
        """Goes to the next match, round the ends; (its number from 1, how many) or (0, 0)."""
        if self.pattern is None:
            return 0, 0
        hits = [i for i in self.indices() if self.pattern.search(self._kept[i][0])]
        if not hits:
            return 0, 0
        if self.found is None:
            n = len(hits) - 1 if step <= 0 else 0
        elif step > 0:
            n = next((k for k, i in enumerate(hits) if i > self.found), 0)
        else:
            n = next((k for k in range(len(hits) - 1, -1, -1) if hits[k] < self.found), len(hits) - 1)
        self.found = hits[n]
        shown = self.indices()
        self.top = shown[max(0, self._at(self.found) - self.size.height // 3)]
        self._show_columns(self.found)
        self.draw()
        return n + 1, len(hits)

    def _show_columns(self, i: int) -> None:
        """Moves a cut line sideways when its match would not be seen."""
        match = self.pattern.search(plain(parse(self._kept[i][0]))) if self.pattern is not None else None
        self.left = 0
        if match is not None and match.end() > self.size.width:
            self.left = max(0, match.start() - self.size.width // 3)

    def on_resize(self) -> None:
        self.draw()

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        event.stop()
        self.action_scroll(3)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        event.stop()
        self.action_scroll(-3)


def _marked(line: Line, pattern: re.Pattern[str], *, chosen: bool) -> Line:
    text = plain(line)
    spans = [m.span() for m in pattern.finditer(text) if m.end() > m.start()]
    if not spans:
        return line
    out: Line = []
    at = 0
    for part, tone in line:
        start = 0
        for a, b in spans:
            begin, end = max(a - at, start), min(b - at, len(part))
            if begin < end:
                out += [(part[start:begin], tone), (part[begin:end], "match" if chosen else "found")]
                start = end
        out.append((part[start:], tone))
        at += len(part)
    return [p for p in out if p[0]]


def _skip(line: Line, cells: int) -> Line:
    if not cells:
        return line
    out: Line = []
    for text, tone in line:
        kept = text[cells:] if cells < len(text) else ""
        cells = max(0, cells - len(text))
        if kept:
            out.append((kept, tone))
    return out


def _split(line: Line, lengths: Sequence[int]) -> list[Line]:
    """`line` cut into pieces of these numbers of characters; blanks at a fold are dropped."""
    chars = [(c, tone) for text, tone in line for c in text]
    out: list[Line] = []
    at = 0
    for n in lengths:
        while out and at < len(chars) and chars[at][0] == " " and len(chars) - at > n:
            at += 1
        piece: Line = []
        for c, tone in chars[at : at + n]:
            if piece and piece[-1][1] == tone:
                piece[-1] = (piece[-1][0] + c, tone)
            else:
                piece.append((c, tone))
        out.append(piece)
        at += n
    return out

"""A window on a log that grows: follow or stay, fold or cut, search, levels. Keeps a bounded past."""

import re
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from textual.binding import Binding, BindingType
from textual.events import MouseScrollDown, MouseScrollUp

from eccon.console.draw import figures
from eccon.console.draw.text import Line, clean, fit, fit_line, line_width, plain, wrap
from eccon.console.logtext import level_of, parse, time_of
from eccon.console.widgets.lines import Lines

__all__ = ["KEPT", "LogView", "pattern_of"]

KEPT = 20_000
"""Lines kept; older ones are asked for again when wanted."""
SOURCE_WIDTH = 11


def pattern_of(words: str) -> re.Pattern[str] | None:
    """The pattern of a search: `/…/` is a regular expression, all else is literal. Raises re.error."""
    if not words:
        return None
    if len(words) > 2 and words.startswith("/") and words.endswith("/"):
        return re.compile(words[1:-1], re.IGNORECASE)
    return re.compile(re.escape(words), re.IGNORECASE)


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One line of a log."""

    text: str
    rank: int
    """Its level, by position in LEVELS."""
    at: float
    """Unix time that it gives, else that of the line before; 0 when none does."""
    source: str = ""
    """Whose log it is, where several are shown together."""


class LogView(Lines, can_focus=True):
    """Lines of a log, or of several by time. `top` is the first line shown, None while it follows the end."""

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
        self.timed = False
        """Whether each line begins with its time, in one form for all logs."""
        self.left = 0
        self.least = 0
        self.pattern: re.Pattern[str] | None = None
        self.found: int | None = None
        self.marked: int | None = None
        """The line that was jumped to."""
        self.dropped = 0
        """Lines that fell off the front."""
        self._kept: list[Entry] = []
        self._shown: list[int] | None = None
        self._last: dict[str, tuple[int, float]] = {}

    @property
    def lines_kept(self) -> list[str]:
        """The raw lines at hand."""
        return [e.text for e in self._kept]

    @property
    def count(self) -> int:
        """How many lines are at hand."""
        return len(self._kept)

    def clear(self) -> None:
        """Forgets all lines."""
        self._kept.clear()
        self._last.clear()
        self._shown = None
        self.dropped = 0
        self.top = self.found = self.marked = None

    def add(self, lines: Sequence[str], source: str = "") -> None:
        """Appends lines. A line without a level continues the one before (a traceback); so with the time."""
        self.add_all([(source, text) for text in lines])

    def add_all(self, lines: Sequence[tuple[str, str]]) -> None:
        """Adds lines of several sources, each with its source, in the order of their times."""
        now = time.time()
        fresh = []
        for source, text in lines:
            before, at = self._last.get(source, (0, 0.0))
            rank = level_of(text)
            if rank == 0 and text[:1] in (" ", "\t", "^"):
                rank = before
            at = time_of(text, now) or at
            self._last[source] = rank, at
            fresh.append(Entry(text, rank, at, source))
        self._take(fresh)
        if (over := len(self._kept) - KEPT) > 0:
            del self._kept[:over]
            self.dropped += over
            self.top = None if self.top is None else max(0, self.top - over)
            self.found = None if self.found is None or self.found < over else self.found - over
            self.marked = None if self.marked is None or self.marked < over else self.marked - over
        self._shown = None
        self.draw()

    def _take(self, fresh: list[Entry]) -> None:
        """Appends, or sorts in where several logs are merged; what is looked at stays in its place."""
        several = any(e.source for e in fresh)
        if several:
            fresh.sort(key=_when)
        late = several and self._kept and fresh and fresh[0].at < self._kept[-1].at
        if not late:
            self._kept += fresh
            return
        held = [None if i is None else self._kept[i] for i in (self.top, self.found, self.marked)]
        self._kept = sorted(self._kept + fresh, key=_when)
        places = {id(e): i for i, e in enumerate(self._kept)}
        self.top, self.found, self.marked = (None if e is None else places[id(e)] for e in held)

    def set_level(self, least: int) -> None:
        """Shows only lines of at least this rank."""
        self.least = least
        self._shown = None
        self.top = None
        self.draw()

    def indices(self) -> list[int]:
        """Positions of the lines that pass the level."""
        if self._shown is None:
            self._shown = [i for i, e in enumerate(self._kept) if e.rank >= self.least]
        return self._shown

    def reaches(self, at: float) -> bool:
        """Whether the lines at hand go back to that time."""
        first = next((e.at for e in self._kept if e.at), None)
        return first is not None and first <= at

    def go_to(self, at: float) -> bool:
        """Shows the first line that is not older than a Unix time, marked; False when there is none."""
        hit = next((i for i in self.indices() if self._kept[i].at >= at), None)
        if hit is None:
            return False
        self.marked = hit
        self.top = self._before(hit)
        self.draw()
        return True

    def draw(self) -> None:
        """The window's lines: from `top` down, or the end of the log."""
        width, height = self.size
        if not width or not height:
            return
        shown = self.indices()
        lines: list[Line] = []
        marked = -1
        if self.top is None:
            for i in reversed(shown[-height:]):
                lines[:0] = self._folded(i, width)
                if len(lines) >= height:
                    break
            lines = lines[-height:]
        else:
            for i in shown[self._at(self.top) :][:height]:
                if i == self.marked:
                    marked = len(lines)
                lines += self._folded(i, width)
                if len(lines) >= height:
                    break
        self.show(lines[:height], marked)

    def _before(self, index: int) -> int:
        """The first line to show, so that the line at `index` stands in the window's upper third."""
        shown = self.indices()
        at = self._at(index)
        room = self.size.height // 3
        while at > 0 and room > 0:
            room -= len(self._folded(shown[at - 1], max(self.size.width, 1)))
            if room >= 0:
                at -= 1
        return shown[at]

    def _at(self, index: int) -> int:
        return min(bisect_left(self.indices(), index), max(0, len(self.indices()) - 1))

    def _folded(self, i: int, width: int) -> list[Line]:
        entry = self._kept[i]
        line = parse(entry.text)
        if self.pattern is not None:
            line = _marked(line, self.pattern, chosen=i == self.found)
        head = self._head(entry)
        room = max(width - line_width(head), 1)
        if not self.folded:
            return [fit_line([*head, *_skip(line, self.left)], width)]
        pieces = wrap(plain(line), room)
        blank: Line = [(" " * line_width(head), "text")] if head else []
        folded = _split(line, [len(p) for p in pieces])
        return [fit_line([*(blank if n else head), *piece], width) for n, piece in enumerate(folded)] or [[]]

    def _head(self, entry: Entry) -> Line:
        """The time and the source of a line, where they are shown."""
        head: Line = []
        if self.timed:
            head.append((figures.clock_ms(entry.at) + " " if entry.at else " " * 13, "dim"))
        if entry.source:
            head.append((fit(clean(entry.source), SOURCE_WIDTH) + " ", "accent"))
        return head

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
        hits = [i for i in self.indices() if self.pattern.search(self._kept[i].text)]
        if not hits:
            return 0, 0
        if self.found is None:
            n = len(hits) - 1 if step <= 0 else 0
        elif step > 0:
            n = next((k for k, i in enumerate(hits) if i > self.found), 0)
        else:
            n = next((k for k in range(len(hits) - 1, -1, -1) if hits[k] < self.found), len(hits) - 1)
        self.found = hits[n]
        self.top = self._before(self.found)
        self._show_columns(self.found)
        self.draw()
        return n + 1, len(hits)

    def _show_columns(self, i: int) -> None:
        """Moves a cut line sideways when its match would not be seen."""
        match = self.pattern.search(plain(parse(self._kept[i].text))) if self.pattern is not None else None
        self.left = 0
        if self.folded:
            return
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


def _when(entry: Entry) -> float:
    return entry.at


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

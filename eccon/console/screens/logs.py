"""The log of one process, or of all by time, as it grows."""

import asyncio
import re
from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.timer import Timer
from textual.widget import Widget

from eccon.console.draw.text import Line, clean, fit_line
from eccon.console.logtext import LEVELS, strip_sgr
from eccon.console.screens.base import ConsoleScreen, bindings
from eccon.console.widgets.lines import Lines
from eccon.console.widgets.logview import KEPT, LogView, pattern_of

__all__ = ["ALL", "Logs"]

ALL = "all"
"""Stands for the logs of all processes, merged by time."""
DAEMON = "daemon"
FIRST_LINES = 1000
FIRST_OF_ALL = 300
"""Lines of each log, where all are shown."""


class Logs(ConsoleScreen):
    """Follow, pause, fold, search, levels; `[` and `]` go through the processes.

    Args:
        search: opened at the lines with it; `/…/` is a regular expression.
        at: opened at this Unix time.
    """

    SCOPE: ClassVar[str] = "logs"
    BINDINGS: ClassVar[list[BindingType]] = bindings("logs")
    AUTO_FOCUS = "#log"

    def __init__(self, name: str, search: str = "", at: float | None = None) -> None:
        super().__init__()
        self.process_name = name
        self.words = search
        self.only = ""
        self.skipped = 0
        self._aim = at
        self._asked = KEPT if search else self._first
        self._waiting: list[tuple[str, str]] = []
        self._timer: Timer | None = None
        self._place = ""
        self._ended: dict[str, str] = {}

    @property
    def _first(self) -> int:
        return FIRST_OF_ALL if self.process_name == ALL else FIRST_LINES

    def body(self) -> Iterable[Widget]:
        yield Lines(id="caption")
        yield LogView(id="log")

    @property
    def view(self) -> LogView:
        """The window on the log."""
        return self.query_one("#log", LogView)

    def on_mount(self) -> None:
        self.view.timed = self.process_name == ALL
        self.view.folded = bool(self.words)  # what is looked for stands far to the right in vLLM's lines
        self._search(self.words)
        self._open()

    def _open(self) -> None:
        self.view.clear()
        self._waiting.clear()
        self.skipped = 0
        self._ended.clear()
        self.run_worker(self._read_all(self._asked), group="log", exclusive=True)

    async def _read_all(self, lines: int) -> None:
        names = [self.process_name]
        if self.process_name == ALL:
            names = [*(p.name for p in self.state.processes), DAEMON]
            lines = min(lines, KEPT // len(names))
        await asyncio.gather(*(self._read(name, lines) for name in names))

    async def _read(self, name: str, lines: int) -> None:
        """Reads until the screen closes; a daemon that is lost is asked again."""
        source = name if self.process_name == ALL else ""
        came = False

        def take(texts: list[str]) -> None:
            nonlocal came
            came = True
            self._ended.pop(name, None)
            self._take([(source, text) for text in texts])

        while True:
            problem = await self.console_app.link.read_log(name, 0 if came else lines, take, self.only)
            self._ended[name] = clean(problem)
            self.refresh_body(0)
            await asyncio.sleep(1.0)

    def _take(self, lines: list[tuple[str, str]]) -> None:
        self._waiting += lines
        if (over := len(self._waiting) - KEPT) > 0:
            del self._waiting[:over]
            self.skipped += over
        if self._timer is None:
            self._timer = self.set_timer(
                0.05 if not self.view.count else self.console_app.log_tick_s, self._flush
            )

    def _flush(self) -> None:
        self._timer = None
        lines, self._waiting = self._waiting, []
        self.view.add_all(lines)
        if self._aim is not None:
            self._reach(self._aim)
        if self.view.pattern is not None and self.view.found is None and self.words:
            self._step(-1)
        self.refresh_body(0)

    def _reach(self, at: float) -> None:
        """Goes to a time; asks for more of the past when it is before the first line."""
        if not self.view.reaches(at) and self._asked < KEPT and self.view.count >= self._asked:
            self.act_older()
        elif self.view.go_to(at):
            self._aim = None

    def refresh_body(self, now: float) -> None:  # noqa: ARG002  nothing here grows with time
        view = self.view
        line: Line = [
            (" Log ", "title"),
            (clean("all processes" if self.process_name == ALL else self.process_name), "accent"),
            (f"  {view.count} lines", "dim"),
        ]
        if view.dropped or self.skipped:
            line.append((f"  {view.dropped + self.skipped} not kept", "warn"))
        line.append(("  follows", "ok") if view.top is None else ("  paused", "warn"))
        if view.least:
            line.append((f"  level {LEVELS[view.least]}", "accent"))
        if self.only:
            line.append((f"  only {clean(self.only)}", "accent"))
        if self.words:
            line.append((f"  search {clean(self.words)} {self._place}", "accent"))
        if self._ended:
            line.append((f"  {next(iter(self._ended.values()))}", "error"))
        self.query_one("#caption", Lines).show([fit_line(line, self.size.width)])

    def _search(self, words: str) -> None:
        try:
            self.view.pattern = pattern_of(words)
        except re.error as e:
            self.console_app.say(f"{words}: {e}", "warn")
            return
        self.words = words
        self.view.found = None
        self._place = ""

    def _step(self, step: int) -> None:
        number, count = self.view.find(step)
        self._place = f"{number}/{count}" if count else "not found"
        self.refresh_body(0)

    def act_search(self) -> None:
        """Asks what to search for."""

        def done(words: str | None) -> None:
            if words is not None:
                self._search(words)
                self._step(-1)
                self.view.draw()

        self.console_app.ask_line("Search the log; /…/ is a regular expression", self.words, done)

    def act_only(self) -> None:
        """Asks for a text; the whole log's lines with it are shown, however long the log is."""

        def done(text: str | None) -> None:
            if text is not None and text != self.only:
                self.only = text
                self._asked = KEPT if text else self._first
                self._open()
                self.refresh_body(0)

        self.console_app.ask_line("Only lines of the whole log with this text", self.only, done, live=False)

    def act_next(self) -> None:
        """To the next match."""
        self._step(1)

    def act_previous(self) -> None:
        """To the match before."""
        self._step(-1)

    def act_pause(self) -> None:
        """Stays where it is, or follows again."""
        if self.view.top is None:
            self.view.hold()
        else:
            self.view.action_follow()
        self.refresh_body(0)

    def act_wrap(self) -> None:
        """Folds long lines, or cuts them."""
        self.view.folded = not self.view.folded
        self.view.draw()

    def act_times(self) -> None:
        """Puts each line's time before it, or leaves lines as they are."""
        self.view.timed = not self.view.timed
        self.view.draw()

    def act_level(self) -> None:
        """The next level."""
        self.view.set_level((self.view.least + 1) % len(LEVELS))
        self.refresh_body(0)

    def act_older(self) -> None:
        """Asks for ten times as many lines."""
        self._asked = min(self._asked * 10, KEPT)
        self._open()

    def act_copy(self) -> None:
        """The lines of the window."""
        self.console_app.copy(strip_sgr("\n".join(self.view.lines_kept[-500:])), "the last lines")

    def act_merged(self) -> None:
        """All logs by time, or the one from before."""
        name = next((p.name for p in self.state.processes), DAEMON)
        self._show(name if self.process_name == ALL else ALL)

    def act_forward(self) -> None:
        """The next process's log."""
        self._turn(1)

    def act_backward(self) -> None:
        """The log of the process before."""
        self._turn(-1)

    def _turn(self, by: int) -> None:
        names = [*(p.name for p in self.state.processes), DAEMON, ALL]
        at = names.index(self.process_name) if self.process_name in names else 0
        self._show(names[(at + by) % len(names)])

    def _show(self, name: str) -> None:
        self.process_name = name
        self._asked = self._first
        self.view.timed = name == ALL
        self._open()
        self.refresh_body(0)

"""The log of one process, as it grows."""

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
from eccon.console.widgets.logview import LogView, pattern_of

__all__ = ["Logs"]

FIRST_LINES = 1000
FLOOD = 5_000
"""Lines that may wait for one frame; more are skipped, and counted."""


class Logs(ConsoleScreen):
    """Follow, pause, fold, search, levels; `[` and `]` go through the processes."""

    SCOPE: ClassVar[str] = "logs"
    BINDINGS: ClassVar[list[BindingType]] = bindings("logs")
    AUTO_FOCUS = "#log"

    def __init__(self, name: str, search: str = "") -> None:
        super().__init__()
        self.process_name = name
        self.words = search
        self.skipped = 0
        self._asked = FIRST_LINES
        self._waiting: list[str] = []
        self._timer: Timer | None = None
        self._place = ""
        self._ended = ""

    def body(self) -> Iterable[Widget]:
        yield Lines(id="caption")
        yield LogView(id="log")

    @property
    def view(self) -> LogView:
        """The window on the log."""
        return self.query_one("#log", LogView)

    def on_mount(self) -> None:
        self._search(self.words)
        self._open()

    def _open(self) -> None:
        self.view.clear()
        self._waiting.clear()
        self.skipped = 0
        self._ended = ""
        self.run_worker(self._read(self.process_name, self._asked), group="log", exclusive=True)

    async def _read(self, name: str, lines: int) -> None:
        """Reads until the screen closes; a daemon that is lost is asked again."""
        while True:
            problem = await self.console_app.link.read_log(name, lines, self._take)
            self._ended = clean(problem)
            self.refresh_body(0)
            await asyncio.sleep(1.0)
            lines = 0 if self.view.lines_kept or self._waiting else self._asked

    def _take(self, lines: list[str]) -> None:
        self._ended = ""
        self._waiting += lines
        if (over := len(self._waiting) - FLOOD) > 0:
            del self._waiting[:over]
            self.skipped += over
        if self._timer is None:
            self._timer = self.set_timer(
                0.05 if not self.view.lines_kept else self.console_app.log_tick_s, self._flush
            )

    def _flush(self) -> None:
        self._timer = None
        lines, self._waiting = self._waiting, []
        self.view.add(lines)
        if self.view.pattern is not None and self.view.found is None and self.words:
            self._step(-1)
        self.refresh_body(0)

    def refresh_body(self, now: float) -> None:  # noqa: ARG002  nothing here grows with time
        view = self.view
        line: Line = [
            (" Log ", "title"),
            (clean(self.process_name), "accent"),
            (f"  {len(view.lines_kept)} lines", "dim"),
        ]
        if view.dropped or self.skipped:
            line.append((f"  {view.dropped + self.skipped} not kept", "warn"))
        line.append(("  follows", "ok") if view.top is None else ("  paused", "warn"))
        if view.least:
            line.append((f"  level {LEVELS[view.least]}", "accent"))
        if self.words:
            line.append((f"  search {clean(self.words)} {self._place}", "accent"))
        if self._ended:
            line.append((f"  {self._ended}", "error"))
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

    def act_level(self) -> None:
        """The next level."""
        self.view.set_level((self.view.least + 1) % len(LEVELS))
        self.refresh_body(0)

    def act_older(self) -> None:
        """Asks for ten times as many lines."""
        self._asked = min(self._asked * 10, 20_000)
        self._open()

    def act_copy(self) -> None:
        """The lines of the window."""
        self.console_app.copy(strip_sgr("\n".join(self.view.lines_kept[-500:])), "the last lines")

    def act_forward(self) -> None:
        """The next process's log."""
        self._turn(1)

    def act_backward(self) -> None:
        """The log of the process before."""
        self._turn(-1)

    def _turn(self, by: int) -> None:
        names = [*(p.name for p in self.state.processes), "daemon"]
        at = names.index(self.process_name) if self.process_name in names else 0
        self.process_name = names[(at + by) % len(names)]
        self._asked = FIRST_LINES
        self._open()
        self.refresh_body(0)

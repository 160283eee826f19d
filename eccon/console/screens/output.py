"""What an `eccon` command says, while it runs beside the console."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from eccon.console.draw.text import Line, wrap
from eccon.console.logtext import parse, strip_sgr
from eccon.console.screens.steady import SteadySize
from eccon.console.widgets.rows import Rows

__all__ = ["Output"]

LINES_MAX = 5000


class Output(SteadySize, ModalScreen[None]):
    """Runs `eccon ARGUMENTS` in a process of its own; leaving ends it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "leave", show=False)]
    AUTO_FOCUS = "#output"

    def __init__(
        self, title: str, arguments: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> None:
        """`environ`: variables for the command beside those that we have."""
        super().__init__(classes="dialog")
        self.heading = title
        self.arguments = list(arguments)
        self.environ = dict(environ or {})
        self.code: int | None = None
        self._texts: list[str] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="box wide"):
            yield Rows("…", document=True, id="output")

    def on_mount(self) -> None:
        self.query_one(".box").border_title = f"{self.heading}   esc closes"
        self.run_worker(self._run(), group="output", exclusive=True)

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    async def _run(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "eccon", *self.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self.environ},
        )
        assert process.stdout is not None  # noqa: S101  a pipe was asked for
        rest = b""
        try:
            while data := await process.stdout.read(65536):
                *lines, rest = (rest + data).split(b"\n")
                self._texts += [line.decode(errors="replace") for line in lines]
                del self._texts[:-LINES_MAX]
                self.draw()
            if rest:
                self._texts.append(rest.decode(errors="replace"))
            self.code = await process.wait()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        self.draw()

    def draw(self) -> None:
        """All that was said, folded to the width, and how it ended."""
        if not self.query("#output"):
            return  # the app is closing
        rows = self.query_one("#output", Rows)
        width = max(rows.size.width - 1, 8)
        lines: list[Line] = []
        for text in self._texts:
            parts = parse(text)
            if sum(len(t) for t, _ in parts) <= width:
                lines.append([(" ", "text"), *parts])
            else:
                plain = "".join(t for t, _ in parse(strip_sgr(text)))
                lines += [[(" ", "text"), (piece, parts[0][1])] for piece in wrap(plain, width)]
        if self.code is not None:
            lines += [[], [(f" ended with {self.code}", "ok" if self.code == 0 else "warn")]]
        rows.put([], [(str(i), line) for i, line in enumerate(lines)])

    def action_leave(self) -> None:
        """Closes; a command under way is ended."""
        self.dismiss(None)

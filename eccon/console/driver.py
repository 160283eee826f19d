"""The terminal itself: Textual's driver, made safe against a terminal that is gone or does not read.

Textual's own input thread spins at the end of its input, its writer thread dies of a closed
terminal and then blocks the event loop; both end the console here.
"""

import codecs
import os
import select
import threading
import time
from collections.abc import Callable
from queue import Queue
from typing import IO, TYPE_CHECKING

from textual._xterm_parser import XTermParser
from textual.drivers._writer_thread import WriterThread
from textual.drivers.linux_driver import LinuxDriver

if TYPE_CHECKING:
    from eccon.console.opening import Opening
    from eccon.console.pictures.answers import Answers, Strainer

__all__ = ["ConsoleDriver"]

HUNG_UP = 129
"""Exit code as after SIGHUP: the terminal is gone."""

BACKLOG = 3
"""Writes that may wait for the terminal before frames are skipped."""

EXIT_WITHIN_S = 1.5

ALTERNATE_SCREEN = "\x1b[?1049h"

ANSWER_S, LATE_S = 0.3, 3.0
"""At the end the terminal's answer is waited for so long, else the shell would take it for typed; one to a
question that is older will not come."""


class _Writer(WriterThread):
    """Writes until the terminal fails, then swallows what comes and says so once."""

    def __init__(self, file: IO[str], on_error: "threading.Event") -> None:
        super().__init__(file)
        self._queue: Queue[str | None] = Queue()
        self.failed = on_error

    @property
    def waiting(self) -> int:
        """Writes that the terminal has not taken yet."""
        return self._queue.qsize()

    def run(self) -> None:
        while (text := self._queue.get()) is not None:
            if self.failed.is_set():
                continue
            try:
                self._file.write(text)
                if not self._queue.qsize():
                    self._file.flush()
            except (OSError, ValueError):
                self.failed.set()


class ConsoleDriver(LinuxDriver):
    """Reads keys without waking up for nothing, and exits when the terminal hangs up."""

    _writer: _Writer | None = None
    _wake: tuple[int, int] | None = None
    _raised = False
    _strainer: "Strainer | None" = None
    _answered: Callable[["Answers"], None]
    _complete: threading.Event
    _asked: float
    farewell: Callable[[], str] | None = None
    """What the terminal is sent before it is handed back."""

    def ask(self, answered: Callable[["Answers"], None]) -> "Answers":
        """Asks the terminal what pictures it can show; a second time, only for what may have changed.

        What it has said before is returned, `answered` is called in the app's loop with what it says now.
        Answers that nobody waits for any more are taken out of the input all the same.
        """
        from eccon.console.pictures.answers import ASK, ASK_SIZE, Strainer  # noqa: PLC0415  when wanted

        self._answered = answered
        again = self._strainer is not None and self._strainer.answers.complete
        if self._strainer is None:
            self._complete = threading.Event()
            self._strainer = Strainer()
        self._asked = time.monotonic()
        self._strainer.asked(self._asked)
        self.write(ASK_SIZE if again else ASK)
        self.flush()
        return self._strainer.answers

    def stop_application_mode(self) -> None:
        if self.farewell is not None:
            self.write(self.farewell())
        if self._strainer is not None and not self.gone and time.monotonic() - self._asked < LATE_S:
            self._complete.wait(ANSWER_S)
        super().stop_application_mode()

    def start_application_mode(self) -> None:
        self._wake = os.pipe()
        self._failed = threading.Event()
        opening: Opening | None = getattr(self._app, "opening", None)
        if opening is None or opening.handed_over:
            super().start_application_mode()  # type: ignore[no-untyped-call]
            return
        self._raised = True
        super().start_application_mode()  # type: ignore[no-untyped-call]
        self._raised = False
        self.attrs_before = opening.before
        opening.handed_over = True

    def write(self, data: str) -> None:
        """To the terminal, but for the switch to a screen that it is on already: some clear it then."""
        if not (self._raised and data == ALTERNATE_SCREEN):
            super().write(data)

    @property
    def _writer_thread(self) -> WriterThread | None:
        return self._writer

    @_writer_thread.setter
    def _writer_thread(self, value: WriterThread | None) -> None:
        """Textual starts its own writer; ours takes its place before it is used."""
        if value is None or self._file is None:
            self._writer = None
            return
        self._writer = _Writer(self._file, self._failed)

    @property
    def busy(self) -> bool:
        """Whether the terminal is behind, so that a frame is better skipped."""
        return self._writer is not None and self._writer.waiting > BACKLOG

    @property
    def gone(self) -> bool:
        """Whether writing to the terminal failed."""
        return self._failed.is_set()

    def disable_input(self) -> None:
        if self._wake is not None:
            os.write(self._wake[1], b"x")
        super().disable_input()

    def close(self) -> None:
        """Ends the writer; a terminal that does not read any more cannot hold us up."""
        writer = self._writer
        if writer is not None and writer.is_alive():
            threading.Thread(target=_exit_anyway, args=(writer,), daemon=True).start()
        super().close()
        if self._wake is not None:
            for fd in self._wake:
                os.close(fd)
            self._wake = None

    def run_input_thread(self) -> None:
        """Feeds keys until asked to end or until the input does."""
        parser = XTermParser(self._debug)
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        wake = self._wake[0] if self._wake is not None else -1
        poller = select.poll()
        poller.register(self.fileno, select.POLLIN)
        if wake >= 0:
            poller.register(wake, select.POLLIN)
        while not self.exit_event.is_set():
            # A lone escape is told from a sequence by the silence after it.
            soon = parser._timeout_time is not None or (self._strainer is not None and self._strainer.holding)
            ready = dict(poller.poll(20 if soon else 60_000))
            if self.exit_event.is_set():
                return
            keys = ""
            if self.fileno in ready:
                try:
                    data = os.read(self.fileno, 4096)
                except OSError:
                    data = b""
                if not data:
                    self._hang_up()
                    return
                keys = decode(data)
            keys = self._without_answers(keys)
            for event in parser.feed(keys) if keys else ():  # an empty text means the end to the parser
                self.process_message(event)
            for event in parser.tick():
                self.process_message(event)

    def _without_answers(self, text: str) -> str:
        """The keys in what came in; the terminal's answers are told to who asked."""
        strainer = self._strainer
        if strainer is None:
            return text
        before = strainer.answers
        now = time.monotonic()
        keys = strainer.feed(text, now) if text else strainer.tick(now)
        if strainer.answers != before:
            if strainer.answers.complete:
                self._complete.set()
            # By the app's own queue: what runs for it has to know that it does.
            self._loop.call_soon_threadsafe(self._app.call_later, self._answered, strainer.answers)
        return keys

    def _hang_up(self) -> None:
        self._loop.call_soon_threadsafe(self._app.exit, None, HUNG_UP)


def _exit_anyway(writer: _Writer) -> None:
    """Ends the process when the writer cannot: its terminal neither reads nor closes."""
    writer.join(EXIT_WITHIN_S)
    if writer.is_alive():
        os._exit(HUNG_UP)

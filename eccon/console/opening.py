"""The first frame: on the terminal while Textual is still being imported, which takes longer than all else.

It is the overview of the daemon's state at that moment, drawn by the same functions as ever. The app takes
the terminal over as it is: its own first frame sends the cells that differ, which are few.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from rich.color import ColorSystem

from eccon import peek
from eccon.console import actions, firstframe
from eccon.console.draw import glance
from eccon.console.draw.flow import WINDOWS
from eccon.console.draw.shape import Shape
from eccon.console.paint import Painter
from eccon.console.setup import Setup
from eccon.console.source import OF_RECORDINGS
from eccon.model import ClusterState

__all__ = ["Opening", "begin"]

STATE_WITHIN_S = 0.25
"""A daemon that takes longer is waited for by the app."""

UP = "\x1b[?1049h\x1b[?25l"
MODES = (1000, 1003, 1015, 1006, 1004, 2004)
"""What the app turns on at its start; a signal may come in the middle of that."""
DOWN = "".join(f"\x1b[?{mode}l" for mode in MODES) + "\x1b[?7h\x1b[m\x1b[?25h\x1b[?1049l"
DOWN_WITHIN_S = 0.5

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


class Opening:
    """The first frame, and the terminal as it was before."""

    def __init__(self, state: ClusterState, painter: Painter, frame: str) -> None:
        self.state = state
        self.painter = painter
        self.before: list[Any] = []
        """The terminal's settings."""
        self.handed_over = False
        """Whether the app has the terminal, and is to give it back."""
        self._handlers: dict[int, Any] = {}
        """Those of signals that we took the place of."""
        self._frame = frame.encode()
        self._input, self._output = 0, 2

    def show(self) -> bool:
        """Draws; False when this terminal lets us not, and is as it was."""
        try:
            self._input, self._output = sys.__stdin__.fileno(), sys.__stderr__.fileno()  # type: ignore[union-attr]
            if _in_background(self._input):
                return False
            self.before = termios.tcgetattr(self._input)
            self._arm()  # before there is anything to be taken back
            self._raise()
        except (OSError, ValueError, AttributeError, termios.error):
            self.lower()
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            return False
        return True

    def _arm(self) -> None:
        ends = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        for number, handler in (
            *((n, self._leave) for n in ends),
            (signal.SIGTSTP, self._stop),
            (signal.SIGWINCH, self._resized),
        ):
            self._handlers[number] = signal.signal(number, handler)

    def lower(self) -> None:
        """The terminal as it was, unless the app has it."""
        if self.before and not self.handed_over:
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self._input, termios.TCSANOW, self.before)
                self._write(DOWN.encode())

    def release(self) -> None:
        """The app sees to signals from here on."""
        if signal.getsignal(signal.SIGQUIT) == self._leave:
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)

    def _raise(self) -> None:
        # What is typed from here on is for the app: it is kept, as it is, and not echoed over the frame.
        settings = termios.tcgetattr(self._input)
        settings[0] &= ~(termios.IXON | termios.IXOFF | termios.ICRNL | termios.INLCR | termios.IGNCR)
        settings[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG)
        settings[6] = [*settings[6]]
        settings[6][termios.VMIN] = 1
        termios.tcsetattr(self._input, termios.TCSANOW, settings)
        self._write(UP.encode() + self._frame)

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._output, data) :]
            except BlockingIOError:
                select.select([], [self._output], [])

    def _leave(self, number: int, _: FrameType | None) -> None:
        """Nothing runs yet that would have to be ended; a terminal that does not read is not waited for."""
        self.handed_over = False
        lowering = threading.Thread(target=self.lower, daemon=True)
        lowering.start()
        lowering.join(DOWN_WITHIN_S)
        os._exit(128 + number)

    def _resized(self, _number: int, _: FrameType | None) -> None:
        """Terminals cut what does not fit any more: the app is to draw all of it."""
        self.painter.forget()

    def _stop(self, _number: int, _: FrameType | None) -> None:
        self.lower()
        os.kill(os.getpid(), signal.SIGSTOP)
        with contextlib.suppress(OSError, termios.error):
            self._raise()


def _in_background(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:
        return False  # it is not this session's terminal, so there are no jobs


def colour_system(environ: Mapping[str, str]) -> ColorSystem:
    """How many colours the terminal has, by the same signs that Textual goes by."""
    if environ.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit"):
        return ColorSystem.TRUECOLOR
    of_term = environ.get("TERM", "").strip().lower().rpartition("-")[2]
    return ColorSystem.EIGHT_BIT if of_term in ("256color", "kitty") else ColorSystem.STANDARD


def begin(socket: Path, setup: Setup, *, read_only: bool, environ: Mapping[str, str]) -> Opening | None:
    """Shows the first frame; None where that is the app's to do: no state at once, a page in a browser."""
    if any(environ.get(name) for name in ("TEXTUAL_DRIVER", "TEXTUAL_FILTERS", "TEXTUAL_COLOR_SYSTEM")):
        return None
    shape = Shape(*shutil.get_terminal_size(), setup.low_bandwidth)
    state = None if shape.small else peek.state(socket, STATE_WITHIN_S)
    if state is None:
        return None
    footer = [
        a for a in actions.footer("overview") if a.name not in OF_RECORDINGS and not (a.mutates and read_only)
    ]
    scene = glance.Scene(
        state=state,
        shape=shape,
        now=time.time(),
        window=WINDOWS[1],
        flag="read-only" if read_only else "",
        footer=footer,
        keymap=setup.settings.keys,
    )
    painter = Painter(colour_system(environ))
    painter.resize(shape.width, shape.height)
    frame = firstframe.paint(glance.blocks(scene), setup, painter, boxed=shape.boxed)
    opening = Opening(state, painter, frame)
    return opening if opening.show() else None

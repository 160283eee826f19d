"""The console in a process of its own on a real pseudo-terminal, and what a terminal would show of it."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pyte

__all__ = ["Terminal", "open_console", "open_console_on"]


class Terminal:
    """One console process. `screen` is the terminal's content after all bytes so far."""

    def __init__(self, argv: list[str], env: dict[str, str], width: int, height: int) -> None:
        self.master, slave = pty.openpty()
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self.screen)
        self.resize(width, height, tell=False)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        # A shell starts what is to run behind it with these ignored; a terminal's own programs heed them.
        ignored = [n for n in (signal.SIGINT, signal.SIGQUIT) if signal.getsignal(n) is signal.SIG_IGN]
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        self.process = subprocess.Popen(
            argv, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True, close_fds=True
        )
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        self.output = b""
        self.closed = False

    def resize(self, width: int, height: int, tell: bool = True) -> None:
        """Gives the terminal another size, as a window manager does."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        if tell:
            if width and height:
                self.screen.resize(height, width)
            self.process.send_signal(signal.SIGWINCH)

    def read(self, seconds: float = 0.05) -> bytes:
        """Takes what the console wrote, waiting at most so long for something."""
        got = b""
        while not self.closed and select.select([self.master], [], [], seconds if not got else 0.01)[0]:
            try:
                piece = os.read(self.master, 65536)
            except OSError:
                break
            if not piece:
                break
            got += piece
            self.feed(piece)
        self.output += got
        return got

    def feed(self, piece: bytes) -> None:
        """What the console wrote, onto the screen."""
        # pyte knows neither the kitty keyboard's sequences nor queries of modes.
        self._stream.feed(piece.replace(b"\x1b[>25u", b"").replace(b"\x1b[<u", b""))

    def settle(self, quiet: float = 0.25, seconds: float = 10.0) -> None:
        """Reads until nothing has come for a while."""
        end = time.monotonic() + seconds
        while self.read(quiet) and time.monotonic() < end:
            pass

    @property
    def lines(self) -> list[str]:
        """The screen's lines."""
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        """The screen as text."""
        return "\n".join(self.lines)

    def until(self, there: "str | Callable[[], Any]", seconds: float = 30.0) -> None:
        """Reads until a text is on the screen, or a condition holds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.read()
            if there in self.text if isinstance(there, str) else there():
                return
            if self.process.poll() is not None:
                self.read(0.2)
                if there in self.text if isinstance(there, str) else there():
                    return
                break
        msg = f"not within {seconds:g} s: {there}; the screen (exit {self.process.poll()}):\n{self.text}"
        raise AssertionError(msg)

    def press(self, keys: str) -> None:
        """Types."""
        os.write(self.master, keys.encode())

    def wait(self, seconds: float = 45.0) -> int:
        """The exit code; reads on meanwhile."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            self.read()
        self.read(0.1)
        code = self.process.poll()
        assert code is not None, f"did not end within {seconds:g} s"
        return code

    def hang_up(self) -> None:
        """The terminal goes away."""
        if not self.closed:
            os.close(self.slave)
            os.close(self.master)
            self.closed = True

    def restored(self) -> bool:
        """Whether the terminal is as it was: its settings, main screen, mouse and paste off, cursor shown."""
        out = self.output
        ends = all(
            out.rfind(b"\x1b[?%bl" % mode) > out.rfind(b"\x1b[?%bh" % mode)
            for mode in (b"1049", b"1000", b"1003", b"2004")
        )
        cursor = out.rfind(b"\x1b[?25h") > out.rfind(b"\x1b[?25l")
        return ends and cursor and termios.tcgetattr(self.slave) == self.before


AnyTerminal = TypeVar("AnyTerminal", bound=Terminal)

MAIN = """
import sys
from pathlib import Path
from eccon import console
sys.exit(console.run(Path(sys.argv[1]), on_quit_ask="ask" in sys.argv, read_only="read-only" in sys.argv))
"""


@contextmanager
def open_console(
    socket: Path,
    *options: str,
    size: tuple[int, int] = (80, 24),
    env: dict[str, str] | None = None,
    main: str = MAIN,
) -> Iterator[Terminal]:
    """A console on `socket`; killed at the end when it did not end by itself."""
    with open_console_on(Terminal, socket, *options, size=size, env=env, main=main) as terminal:
        yield terminal


@contextmanager
def open_console_on(
    kind: type[AnyTerminal],
    socket: Path,
    *options: str,
    size: tuple[int, int] = (80, 24),
    env: dict[str, str] | None = None,
    main: str = MAIN,
) -> Iterator[AnyTerminal]:
    """The same on a terminal of another kind."""
    home = socket.parent
    full = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "LC_ALL", "LC_CTYPE", "COLORTERM")}
    full |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8", "HOME": str(home)}
    full |= {"XDG_CONFIG_HOME": str(home / "config"), "TMPDIR": str(home), **(env or {})}
    terminal = kind([sys.executable, "-c", main, str(socket), *options], full, *size)
    try:
        yield terminal
    finally:
        if terminal.process.poll() is None:
            terminal.process.kill()
        terminal.process.wait(10)
        terminal.hang_up()

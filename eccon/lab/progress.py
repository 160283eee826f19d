"""What `setup` is doing, on stderr: one line a step, and on a terminal the present one moving."""

import sys
import time
from threading import Event, Thread
from types import TracebackType

__all__ = ["Step"]

WIDTH = 78
TICK_S = 1.0
"""How often the time moves on a terminal."""
SAY_S = 20.0
"""How often a step that goes on is heard of where no line can move."""


class Step:
    """One step, as a context: its title, then what it is at, then how long it took."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._detail = ""
        self._moving = sys.stderr.isatty()
        self._began = time.monotonic()
        self._ended = Event()
        # pip is silent for minutes while it unpacks: the time is told by a thread of its own.
        self._clock = Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "Step":  # noqa: PYI034  Self is 3.11
        self._say("…")
        self._clock.start()
        return self

    def at(self, detail: str) -> None:
        """What it is at; shown with the next tick."""
        self._detail = detail

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._clock.join()
        self._say(f"{'failed' if kind else 'done'} in {self._seconds():.0f} s")
        if self._moving:
            sys.stderr.write("\n")

    def _tick(self) -> None:
        while not self._ended.wait(TICK_S if self._moving else SAY_S):
            self._say(f"{self._seconds():.0f} s  {self._detail}")

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _say(self, what: str) -> None:
        line = f"{self._title:<25} {what}"[:WIDTH].rstrip()
        sys.stderr.write(f"\r\x1b[K{line}" if self._moving else f"{line}\n")
        sys.stderr.flush()

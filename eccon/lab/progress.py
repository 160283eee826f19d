"""What `setup` is doing, on stderr: one line a step, and on a terminal the present one moving."""

import sys
import time
from types import TracebackType

__all__ = ["Step"]

WIDTH = 76
EVERY_S = 15.0
"""How often a step that goes on is heard of where no line can move."""


class Step:
    """One step, as a context: its title, then what it is at, then how long it took."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._moving = sys.stderr.isatty()
        self._began = self._said = time.monotonic()

    def __enter__(self) -> "Step":  # noqa: PYI034  Self is 3.11
        self._write("…" if self._moving else "…\n")
        return self

    def at(self, detail: str) -> None:
        """What it is at; said at once on a terminal, else now and then."""
        now = time.monotonic()
        if self._moving:
            self._write(f"… {now - self._began:.0f} s  {detail}")
        elif now - self._said >= EVERY_S:
            self._said = now
            self._write(f"… {now - self._began:.0f} s  {detail}\n")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write(f"{'failed' if kind else 'done'} in {time.monotonic() - self._began:.1f} s\n")

    def _write(self, tail: str) -> None:
        text = f"{self._title:<26} {tail.rstrip()}"[:WIDTH]
        start = f"\r\x1b[K{text}" if self._moving else text
        sys.stderr.write(start + ("\n" if tail.endswith("\n") else ""))
        sys.stderr.flush()

"""A recording as a source of the console: at any speed, held, or gone through step by step."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from eccon.console.source import Problem, Sink
from eccon.recording import Record, RecordingError, read

__all__ = ["Replay"]

SPEED_MIN, SPEED_MAX = 1 / 16, 4096.0
BURST = 200
"""Records that are taken without a look at the keys, when the replay is behind."""


class Replay:
    """Plays a file once. Its clock stands at the time of the recording."""

    lacks = frozenset({"logs", "doctor", "diagnostics"})

    def __init__(self, path: Path, speed: float = 1.0) -> None:
        self.path = path
        self.speed = min(max(speed, SPEED_MIN), SPEED_MAX)
        self.held = False
        self.ended = False
        self._at = 0.0
        self._since = time.monotonic()
        self._changed = asyncio.Event()

    @property
    def flag(self) -> str:
        """ "replay ×4", "replay held", "replay ended"."""
        how = "ended" if self.ended else "held" if self.held else f"×{self.speed:g}"
        return f"replay {how}"

    def now(self) -> float:
        """The time of the recording that is played now."""
        if not self._at:
            return time.time()
        if self.held or self.ended:
            return self._at
        return self._at + (time.monotonic() - self._since) * self.speed

    def faster(self, factor: float) -> None:
        """Changes the speed, within bounds."""
        self._settle()
        self.speed = min(max(self.speed * factor, SPEED_MIN), SPEED_MAX)
        self._changed.set()

    def hold(self) -> None:
        """Stops the clock, or lets it run again."""
        self._settle()
        self.held = not self.held
        self._changed.set()

    def _settle(self) -> None:
        if self._at:
            self._at, self._since = self.now(), time.monotonic()

    async def watch(self, sink: Sink) -> None:
        """Plays the file into `sink`, then stays at its end."""
        try:
            for n, record in enumerate(read(self.path)):
                if not self._at:
                    self._at, self._since = record.at, time.monotonic()
                await self._until(record)
                sink.take(record.item)
                if n % BURST == 0:
                    await asyncio.sleep(0)
        except RecordingError as e:
            sink.connection(str(e))
        self._settle()
        self.ended = True
        await asyncio.Event().wait()

    async def _until(self, record: Record) -> None:
        while (left := record.at - self.now()) > 0:
            self._changed.clear()
            if self.held:
                await self._changed.wait()
                continue
            waiting = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait({waiting}, timeout=left / self.speed)
            waiting.cancel()

    async def do(self, action: str, name: str = "") -> str:
        """The past is not changed."""
        msg = f"a recording cannot be changed: {action} {name}".rstrip()
        raise Problem(msg)

    async def read_log(
        self,
        name: str,
        lines: int,  # noqa: ARG002  the signature of sources
        take: Callable[[list[str]], None],  # noqa: ARG002
        grep: str = "",  # noqa: ARG002
    ) -> str:
        """Logs are not recorded."""
        return f"a recording has no logs, so none of {name}"

    def prompt(self, body: bytes, request_id: str) -> AsyncIterator[bytes]:
        """The past answers nothing."""
        msg = f"a recording answers no requests: {len(body)} bytes of {request_id} were not sent"
        raise Problem(msg)

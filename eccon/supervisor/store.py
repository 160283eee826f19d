"""What a daemon must know again after its restart; a crash or a full disk leaves the old state."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from eccon.launch import EncoderSlot
from eccon.model import LogEvent
from eccon.signals.milestones import History
from eccon.signals.transfers import Latencies

__all__ = ["Remembered", "Saved", "Store"]

SETTLE_S = 0.3
"""Changes in quick succession are written once."""
EVENTS_SAVED = 200


class Remembered(msgspec.Struct, kw_only=True):
    """Of one process."""

    wanted: bool = False
    restarts: int = 0
    deaths: int = 0
    aside: bool = False
    failed: str = ""
    life: str = ""
    """Id of the life that `ready_at` is of."""
    ready_at: float | None = None


class Saved(msgspec.Struct, kw_only=True):
    """The state file. What runs is not in it: that is told by the lives themselves."""

    version: int = 1
    wanted: bool = False
    config_path: str = ""
    slots: list[EncoderSlot] | None = None
    """Encoders of the cluster, with those added; None: as configured."""
    processes: dict[str, Remembered] = {}
    history: History = msgspec.field(default_factory=History)
    events: list[LogEvent] = []
    latencies: dict[str, Latencies] = {}
    """Of deliveries, by encoder."""
    positions: dict[str, tuple[int, int]] = {}
    """Inode and offset up to which each process's log is in `latencies`."""


class Store:
    """Reads once, writes when something changed. `gather` makes what is to be written."""

    def __init__(self, path: Path, gather: Callable[[], Saved], on_trouble: Callable[[str], None]) -> None:
        self.path = path
        self.gather = gather
        self.on_trouble = on_trouble
        """Called with what is wrong, and with nothing when it is well again."""
        self._changed = asyncio.Event()
        self._trouble = ""

    def changed(self) -> None:
        """Something that is remembered is another."""
        self._changed.set()

    async def run(self) -> None:
        """Writes, for as long as the task lives; a last time when it is cancelled."""
        try:
            while True:
                await self._changed.wait()
                await asyncio.sleep(SETTLE_S)
                self._changed.clear()
                data = msgspec.json.encode(self.gather())
                await asyncio.to_thread(self._write, data)
                if self._trouble:
                    await asyncio.sleep(1)
                    self._changed.set()
        finally:
            self._write(msgspec.json.encode(self.gather()))

    def _write(self, data: bytes) -> None:
        trouble = ""
        try:
            write_atomically(self.path, data)
        except OSError as e:
            trouble = f"{self.path} cannot be written: {e.strerror}"
        if trouble != self._trouble:
            self._trouble = trouble
            self.on_trouble(trouble)


def read(path: Path) -> tuple[Saved, str]:
    """What was saved, and what is wrong with it: then it counts as nothing, and the file is kept aside."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Saved), ""
    except FileNotFoundError:
        return Saved(), ""
    except OSError as e:
        return Saved(), f"{path} cannot be read: {e.strerror}"
    except msgspec.DecodeError as e:
        aside = path.with_suffix(".broken")
        with contextlib.suppress(OSError):
            path.replace(aside)
        return Saved(), f"the state file could not be understood ({e}); it is kept as {aside}"


def write_atomically(path: Path, data: bytes) -> None:
    """The whole file, or the old one stays.

    Raises:
        OSError: it could not be written.
    """
    fresh = path.with_name(path.name + ".new")
    try:
        with fresh.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise

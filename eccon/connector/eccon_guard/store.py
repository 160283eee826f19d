"""Tensors that the PD has pulled: bounded by bytes, those already used first; what nobody wants goes by age.

An item that is let go is announced first and freed a little later: the scheduler may have let a request pass
that needs it before the announcement came.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Store"]

GRACE_S = 2.0


class _Entry:
    __slots__ = ("at", "condemned_at", "crc", "nbytes", "tensor", "used")

    def __init__(self, tensor: Any, nbytes: int, crc: int | None, at: float) -> None:
        self.tensor = tensor
        self.nbytes = nbytes
        self.crc = crc
        self.at = at
        self.used = False
        self.condemned_at: float | None = None


class Store:
    """Written by the puller's thread, read by the engine's."""

    def __init__(
        self,
        limit_bytes: int,
        ttl_s: float,
        on_gone: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit_bytes
        self._ttl_s = ttl_s
        self._on_gone = on_gone
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._bytes = 0

    def put(self, mm_hash: str, tensor: Any, nbytes: int, crc: int | None) -> None:
        """Keep an item, in place of an older one of that hash."""
        with self._lock:
            old = self._entries.pop(mm_hash, None)
            if old is not None and old.condemned_at is None:
                self._bytes -= old.nbytes
            self._entries[mm_hash] = _Entry(tensor, nbytes, crc, self._clock())
            self._bytes += nbytes
        self.sweep()

    def get(self, mm_hash: str) -> Any | None:
        """An item for the engine; it stays until its time is over, for other requests with the same one."""
        with self._lock:
            entry = self._entries.get(mm_hash)
            if entry is None:
                return None
            entry.used = True
            return entry.tensor

    def renew(self, mm_hash: str, crc: int) -> bool:
        """Whether this very content is here; its time begins anew then."""
        with self._lock:
            entry = self._entries.get(mm_hash)
            if entry is None or entry.condemned_at is not None or entry.crc != crc:
                return False
            entry.at = self._clock()
            entry.used = False
            return True

    def want(self, hashes: Iterable[str]) -> None:
        """Requests that have not ended want these: their time begins anew."""
        with self._lock:
            now = self._clock()
            for mm_hash in hashes:
                entry = self._entries.get(mm_hash)
                if entry is not None and entry.condemned_at is None:
                    entry.at = now

    def __contains__(self, mm_hash: str) -> bool:
        with self._lock:
            entry = self._entries.get(mm_hash)
            return entry is not None and entry.condemned_at is None

    def hashes(self) -> list[str]:
        """What is at hand."""
        with self._lock:
            return [h for h, e in self._entries.items() if e.condemned_at is None]

    def sweep(self) -> None:
        """Let go what is too old or too much."""
        gone: list[tuple[str, str]] = []
        with self._lock:
            now = self._clock()
            for mm_hash, entry in list(self._entries.items()):
                if entry.condemned_at is not None:
                    if now - entry.condemned_at > GRACE_S:
                        del self._entries[mm_hash]
                elif now - entry.at > self._ttl_s:
                    gone.append((mm_hash, "ttl"))
                    self._condemn(entry, now)
            if self._bytes > self._limit:
                live = [(h, e) for h, e in self._entries.items() if e.condemned_at is None]
                for mm_hash, entry in sorted(live, key=lambda pair: (not pair[1].used, pair[1].at)):
                    if self._bytes <= self._limit:
                        break
                    gone.append((mm_hash, "room"))
                    self._condemn(entry, now)
        for mm_hash, why in gone:
            self._on_gone(mm_hash, why)

    def clear(self) -> None:
        """At the end."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _condemn(self, entry: _Entry, now: float) -> None:
        entry.condemned_at = now
        self._bytes -= entry.nbytes

"""Takes the events of guarded connectors on a unix datagram socket and gives them to the listener."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from eccon.signals.guard import Event, Gaps, parse

__all__ = ["GuardFeed"]

DATAGRAM_MAX = 8192
BURST = 512
"""Events taken in one turn of the loop."""
ROOM = 2**20
TOLD_EVERY_S = 1.0


class GuardFeed:
    """Bound as long as it is open; `lost` counts the events that found no room.

    Args:
        path: of the socket; one that is left there is replaced.
        on_event: gets each event.
        on_lost: gets the count when it has grown, at most once a second.
    """

    def __init__(self, path: Path, on_event: Callable[[Event], None], on_lost: Callable[[int], None]) -> None:
        self._path = path
        self._on_event = on_event
        self._on_lost = on_lost
        self._gaps = Gaps()
        self._told = 0
        self._told_at = 0.0
        self._socket = _bind(path)
        asyncio.get_running_loop().add_reader(self._socket, self._readable)

    @property
    def lost(self) -> int:
        """Events that are known to have found no room."""
        return self._gaps.lost

    def _readable(self) -> None:
        for _ in range(BURST):
            try:
                data = self._socket.recv(DATAGRAM_MAX)
            except (BlockingIOError, InterruptedError):
                break
            event = parse(data)
            if event is not None:
                self._gaps.take(event)
                self._on_event(event)
        now = time.monotonic()
        if self._gaps.lost != self._told and now - self._told_at >= TOLD_EVERY_S:
            self._told, self._told_at = self._gaps.lost, now
            self._on_lost(self._gaps.lost)

    def close(self) -> None:
        """Lets go of the socket; senders then lose what they tell, and go on."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def _bind(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    before = os.umask(0o177)
    try:
        made.bind(str(path))
    finally:
        os.umask(before)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
    made.setblocking(False)
    return made

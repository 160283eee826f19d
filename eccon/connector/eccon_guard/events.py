"""Numbered JSON datagrams to whoever watches. Sending never blocks; what finds no room shows as a gap."""

import itertools
import json
import os
import socket
import threading
import time
from collections import deque

__all__ = ["Events"]

TEXT_MAX = 300
BACKLOG = 1000
"""Events that wait for room: Linux keeps 10 datagrams in a socket by default (net.unix.max_dgram_qlen)."""


class Events:
    """One sender: `s` names it, `n` counts its events from 1, so that the receiver sees what it missed.

    `{"v":1,"who":"encoder-0","l":LEVEL,"s":"9f…","n":7,"t":MICROSECONDS,"k":KIND,"h":HASH,"p":PEER,…}`, t
    since 1970.
    KIND is one of level, save, push, meta, pull_start, pull_done, load, ack, evict, defer, fail. `b` are
    bytes, `x` is text.
    """

    def __init__(self, path: str, who: str, level: str = "") -> None:
        self._path = path
        self._level = level
        self._who = who
        self._sender = os.urandom(6).hex()
        self._number = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._socket = None if not path else socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if self._socket is not None:
            self._socket.setblocking(False)

    def tell(self, kind: str, mm_hash: str = "", *, peer: str = "", nbytes: int = 0, text: str = "") -> None:
        """Send one event, or lose it."""
        if self._socket is None:
            return
        event: dict[str, object] = {"v": 1, "who": self._who, "l": self._level, "s": self._sender, "k": kind}
        more = {"h": mm_hash, "p": peer, "b": nbytes, "x": text[:TEXT_MAX]}
        event.update((key, value) for key, value in more.items() if value)
        with self._lock:
            event["n"] = next(self._number)
            event["t"] = time.time_ns() // 1000
            if len(self._waiting) < BACKLOG:  # else it is lost, and the number tells
                self._waiting.append(json.dumps(event).encode())
            self._send()

    def flush(self) -> None:
        """Send what had no room. To be called now and then."""
        if self._waiting:
            with self._lock:
                self._send()

    def _send(self) -> None:
        while self._waiting and self._socket is not None:
            try:
                self._socket.sendto(self._waiting[0], self._path)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                pass  # nobody is there
            self._waiting.popleft()

    def close(self) -> None:
        """At the end."""
        if self._socket is not None:
            self._socket.close()

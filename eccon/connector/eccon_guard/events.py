"""Numbered JSON datagrams to whoever watches. Sending never blocks; what finds no room shows as a gap."""

import itertools
import json
import os
import socket
import threading
import time

__all__ = ["Events"]

TEXT_MAX = 300


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
            try:
                self._socket.sendto(json.dumps(event).encode(), self._path)
            except OSError:
                return  # nobody there, or no room: the number tells

    def close(self) -> None:
        """At the end."""
        if self._socket is not None:
            self._socket.close()

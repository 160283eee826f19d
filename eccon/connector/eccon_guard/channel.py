"""Notes from worker to scheduler: a unix socket named after the engine's id, known to both.

SOCK_SEQPACKET keeps the order and tells when the other side is gone. The worker is made first, so it listens.
Nothing here blocks. The directory is the user's own, 0700: nobody else may speak or listen.
"""

import contextlib
import hashlib
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from .log import logger
from .notes import Note, decode, encode

__all__ = ["Listener", "Speaker", "meeting_place", "socket_path"]

BACKLOG = 16384
RETRY_S = 0.05
STALE_S = 60.0


def meeting_place(directories: Sequence[str], engine_id: str) -> Path:
    """Where the two meet, in the first of these directories that will do; both come to the same.

    Raises:
        OSError: none will do; it is about the last one.
    """
    *others, last = directories
    for directory in others:
        with contextlib.suppress(OSError):
            return socket_path(directory, engine_id)
    return socket_path(last, engine_id)


def socket_path(directory: str, engine_id: str) -> Path:
    """The socket of an engine there; makes the directory. An id may be of any length and have any signs.

    Raises:
        OSError: it cannot be made, or is not this user's alone.
    """
    where = Path(directory)
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = where.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        msg = f"{where} is not a directory of this user alone (0700)"
        raise PermissionError(msg)
    _tidy(where)
    path = where / f"{hashlib.sha256(engine_id.encode()).hexdigest()[:16]}.sock"
    if len(os.fsencode(path)) > 107:
        msg = f"{path} is too long for a socket"
        raise OSError(msg)
    return path


def _tidy(where: Path) -> None:
    """Remove sockets of processes that were killed before their two halves had met."""
    try:
        bound = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # then it cannot be told which are in use
    for path in where.glob("*.sock"):
        with contextlib.suppress(OSError):
            if str(path) not in bound and time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()


class Speaker:
    """The worker's end. May be used from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.state: Callable[[], list[Note]] = list
        """What a scheduler that begins to listen is told first."""
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._peer: socket.socket | None = None
        path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(str(path))
        path.chmod(0o600)
        self._listening.listen(4)
        self._listening.setblocking(False)

    def say(self, note: Note) -> None:
        """Send a note, now or as soon as there is room."""
        with self._lock:
            self._accept()
            if self._peer is not None:
                self._queue.append(encode(note))
                self._flush()

    def tick(self) -> None:
        """Let a scheduler in, and send what had no room. To be called now and then."""
        with self._lock:
            self._accept()
            self._flush()

    def close(self) -> None:
        """At the end; removes the socket."""
        with self._lock:
            self._queue.clear()
            if self._peer is not None:
                self._peer.close()
            self._listening.close()
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        if self._peer is not None:
            return
        try:
            peer, _ = self._listening.accept()
        except OSError:
            return  # nobody yet
        peer.setblocking(False)
        self._peer = peer
        # One scheduler a life. Without a name nobody else can come, and a kill leaves nothing behind.
        self._path.unlink(missing_ok=True)
        self._listening.close()
        self._state_anew()

    def _state_anew(self) -> None:
        self._queue.clear()
        self._queue.extend(encode(note) for note in (Note("restart"), *self.state()))

    def _flush(self) -> None:
        while self._queue and self._peer is not None:
            try:
                self._peer.send(self._queue[0], socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                if len(self._queue) > BACKLOG:
                    self._state_anew()
                return
            except ConnectionError:
                self._queue.clear()  # the scheduler is gone, and with it the engine
                return
            except OSError as e:
                logger.warning("EC guard: a note was not sent: %s", e)
            self._queue.popleft()


class Listener:
    """The scheduler's end, on the engine's thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._next_try = 0.0

    def drain(self) -> list[Note]:
        """What was said since the last time."""
        if self._socket is None and not self._connect():
            return []
        notes: list[Note] = []
        while self._socket is not None:
            try:
                raw = self._socket.recv(65536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                raw = b""
            if not raw:
                self.close()
                break
            try:
                notes.append(decode(raw))
            except msgspec.DecodeError as e:
                logger.warning("EC guard: a note was not understood: %s", e)
        return notes

    def close(self) -> None:
        """At the end."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> bool:
        now = time.monotonic()
        if now < self._next_try:
            return False
        self._next_try = now + RETRY_S
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            end.connect(str(self._path))
        except OSError:
            end.close()
            return False
        end.setblocking(False)
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket = end
        return True

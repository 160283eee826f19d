"""Follows a log file over its rotations. Reads what others write; holds at most one open file."""

import contextlib
import os
from pathlib import Path

__all__ = ["LINE_MAX", "Tail"]

LINE_MAX = 64 * 1024
"""Bytes of a line that are looked at; the rest of a longer one is passed over."""


class Tail:
    """New whole lines of `path`, which is rotated to `path.1`, `path.2`, … when full.

    Args:
        path: may not exist yet.
        back: bytes before the present end to begin with; None begins at the file's start.
        resume: a `position` of an earlier tail, to go on from while its file is there.
    """

    def __init__(self, path: Path, *, back: int | None = 0, resume: tuple[int, int] | None = None) -> None:
        self.path = path
        self.lost = 0
        """Times that a rotation outran us and lines went unseen."""
        self._fd = -1
        self._inode = 0
        self._rest = b""
        self._unended = 0
        """Bytes read of a line that has not ended."""
        if resume is not None and self._resume(*resume):
            return
        if self._open(path) and back is not None:
            end = os.lseek(self._fd, 0, os.SEEK_END)
            os.lseek(self._fd, max(0, end - back), os.SEEK_SET)
            if back and end > back:
                # Begin at a line's start.
                self._rest = b""
                chunk = os.read(self._fd, min(back, LINE_MAX))
                cut = chunk.find(b"\n") + 1
                os.lseek(self._fd, end - back + cut, os.SEEK_SET)

    def read(self, limit: int = 4 * 2**20) -> bytes:
        """Up to about `limit` bytes of whole lines, the last one ended; empty when there is nothing new."""
        if self._fd < 0:
            # It was not there before: whatever was rotated meanwhile is new too.
            older = self._rotated()
            if not self._open(older[-1][0] if older else self.path):
                return b""
        if self._is_at_the_end():
            return b""
        parts = [self._rest]
        room = limit
        while room > 0:
            part = os.read(self._fd, min(room, 1 << 20))
            if part:
                parts.append(part)
                room -= len(part)
            elif not self._follow():
                break
        data = b"".join(parts)
        cut = data.rfind(b"\n") + 1
        self._unended = len(data) - cut + (self._unended - len(self._rest) if not cut else 0)
        self._rest = data[cut:]
        if len(self._rest) > LINE_MAX:
            self._rest = self._rest[:LINE_MAX]
        return data[:cut]

    def _is_at_the_end(self) -> bool:
        """By one look instead of a read and a look: a daemon asks this of many quiet logs, for days."""
        try:
            stat = os.stat(self.path)  # noqa: PTH116  half of what Path.stat takes
        except OSError:
            return False
        return stat.st_ino == self._inode and stat.st_size == os.lseek(self._fd, 0, os.SEEK_CUR)

    @property
    def offset(self) -> int | None:
        """Where in the present file reading goes on; None while there is none."""
        return os.lseek(self._fd, 0, os.SEEK_CUR) if self._fd >= 0 else None

    @property
    def position(self) -> tuple[int, int] | None:
        """Inode of the file that is read, and where the first line begins that was not given yet."""
        at = self.offset
        return None if at is None else (self._inode, max(0, at - self._unended))

    def earlier(self, limit: int) -> bytes:
        """Up to `limit` bytes of whole lines before the position, of the file that is read."""
        where = self.position
        if where is None or where[1] == 0:
            return b""
        begin = max(0, where[1] - limit)
        data = os.pread(self._fd, where[1] - begin, begin)
        return data if begin == 0 else data[data.find(b"\n") + 1 :]

    def close(self) -> None:
        """Lets go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self, path: Path) -> bool:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        self.close()
        self._fd = fd
        self._inode = os.fstat(fd).st_ino
        return True

    def _resume(self, inode: int, offset: int) -> bool:
        for path in (self.path, *(older for older, _ in self._rotated())):
            if not self._open(path):
                continue
            if self._inode == inode and os.fstat(self._fd).st_size >= offset:
                os.lseek(self._fd, offset, os.SEEK_SET)
                return True
        self.close()
        return False

    def _follow(self) -> bool:
        """At the end of a file that was rotated away: on to its successor. False when there is none."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                return False
        older = self._rotated()
        ours = next((i for i, (_, inode) in enumerate(older) if inode == self._inode), None)
        if ours is None:
            self.lost += 1
            self._rest = b""
            successor = older[-1][0] if older else self.path
        else:
            successor = older[ours - 1][0] if ours else self.path
        return self._open(successor)

    def _rotated(self) -> list[tuple[Path, int]]:
        """Rotated files with their inodes, newest first."""
        found = []
        for n in range(1, 100):
            path = self.path.with_name(f"{self.path.name}.{n}")
            try:
                found.append((path, path.stat().st_ino))
            except OSError:
                break
        return found

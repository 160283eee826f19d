"""Reads log files for people: the last lines, and what comes after them."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

from eccon.paths import ClusterPaths
from eccon.signals.tail import Tail

__all__ = ["DAEMON", "follow", "last_lines", "log_path"]

DAEMON = "daemon"
LOOK_EVERY_S = 0.2
BLOCK = 1 << 16
BLOCKS_MAX = 256
"""16 MB of one file at most, should it hold no line ends."""
FOLLOW_BYTES = 1 << 20
"""A follower that is further behind is told how much it missed instead."""


def log_path(paths: ClusterPaths, name: str) -> Path:
    """The present log file of a process, or of the daemon."""
    return paths.root / "daemon.log" if name == DAEMON else paths.logs / f"{name}.log"


def last_lines(paths: ClusterPaths, name: str, count: int, grep: str = "") -> list[str]:
    """The last `count` lines, over rotated files; with `grep` of those that contain it, in any case."""
    path = log_path(paths, name)
    found = _search(path, count, grep) if grep else _last(path, count)
    return [line.decode(errors="replace") for line in found]


async def follow(paths: ClusterPaths, name: str, count: int, grep: str = "") -> AsyncIterator[bytes]:
    """The last `count` lines, then whole lines as they are written; `grep` as in `last_lines`."""
    path = log_path(paths, name)
    tail = Tail(path)
    wanted = grep.lower().encode()
    try:
        if grep:
            earlier = await asyncio.to_thread(_search, path, count, grep)
        else:
            earlier = await asyncio.to_thread(_last, path, count, tail.offset)
        yield b"".join(line + b"\n" for line in earlier)
        while True:
            data = tail.read()
            if grep:
                data = b"".join(line for line in data.splitlines(keepends=True) if wanted in line.lower())
            if len(data) > FOLLOW_BYTES:
                cut = data.find(b"\n", len(data) - FOLLOW_BYTES) + 1
                skipped = data.count(b"\n", 0, cut)
                data = f"eccon: {skipped} lines skipped\n".encode() + data[cut:]
            if data:
                yield data
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        tail.close()


def _search(path: Path, count: int, grep: str) -> list[bytes]:
    """Newest file first, until there are enough."""
    wanted = grep.lower().encode()
    lines: deque[bytes] = deque()
    for n in range(100):
        if len(lines) >= count:
            break
        part = path if n == 0 else path.with_name(f"{path.name}.{n}")
        try:
            with part.open("rb") as f:
                found = deque(
                    (line.rstrip(b"\n") for line in f if wanted in line.lower()), count - len(lines)
                )
        except OSError:
            break
        lines.extendleft(reversed(found))
    return list(lines)


def _last(path: Path, count: int, end: int | None = None) -> list[bytes]:
    """The last lines before the offset `end` of the present file, or before its end."""
    lines: deque[bytes] = deque()
    for n in range(100):
        if len(lines) >= count:
            break
        part = path if n == 0 else path.with_name(f"{path.name}.{n}")
        try:
            found = _last_of_file(part, count - len(lines), end if n == 0 else None)
        except OSError:
            break
        lines.extendleft(reversed(found))
    return list(lines)


def _last_of_file(path: Path, count: int, end: int | None) -> list[bytes]:
    """Read backwards, so that a large file costs no more than its end."""
    blocks: deque[bytes] = deque()
    newlines = 0
    with path.open("rb") as f:
        at = f.seek(0, os.SEEK_END) if end is None else end
        while at > 0 and newlines <= count and len(blocks) < BLOCKS_MAX:
            step = min(BLOCK, at)
            at -= step
            f.seek(at)
            blocks.appendleft(f.read(step))
            newlines += blocks[0].count(b"\n")
    lines = b"".join(blocks).split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    return lines[-count:] if count > 0 else []

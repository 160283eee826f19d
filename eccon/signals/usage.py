"""CPU and memory of process trees, read from /proc with as few reads as it takes."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

__all__ = ["Figures", "Usage"]

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
SCAN_EVERY_S = 10.0
YOUNG_S = 60.0
SCAN_SHARE = 0.002
"""Of a core that looking for new members may take, however many processes the host has."""


class Figures(msgspec.Struct, frozen=True):
    """Of one tree. `cpu_percent` is of one core, since the sample before; None at the first."""

    cpu_percent: float | None
    rss_bytes: int


class _Row(msgspec.Struct, frozen=True):
    pid: int
    start: int
    parent: int
    session: int
    ticks: int
    rss: int


class Usage:
    """Samples the trees below given processes: whoever descends from one, is in its session, or was left
    to its keeper (a shim, which takes what loses its parent).
    """

    def __init__(self) -> None:
        self._members: dict[str, set[tuple[int, int]]] = {}
        self._mains: dict[str, int] = {}
        self._before: dict[tuple[int, int], int] = {}
        self._at = 0.0
        self._next_scan = 0.0
        self._young_until = 0.0

    def sample(
        self, mains: Mapping[str, int], keepers: Mapping[str, int] | None = None
    ) -> dict[str, Figures]:
        """Figures by name; `mains` maps a name to its main process, `keepers` to that one's keeper."""
        now = time.monotonic()
        if dict(mains) != self._mains:
            self._mains, self._young_until = dict(mains), now + YOUNG_S
            self._next_scan = now
        if now >= self._next_scan:
            self._scan(mains, keepers or {})
            cost = time.monotonic() - now
            # A process that starts has its children soon; later they rarely change.
            self._next_scan = now + (0 if now < self._young_until else max(SCAN_EVERY_S, cost / SCAN_SHARE))
        elapsed = now - self._at
        self._at = now
        seen: dict[tuple[int, int], int] = {}
        figures = {}
        for name, members in self._members.items():
            rows = [row for pid, start in members if (row := _read(pid)) and row.start == start]
            if not rows:
                continue
            ticks, known = 0, False
            for row in rows:
                who = (row.pid, row.start)
                seen[who] = row.ticks
                if who in self._before:
                    known = True
                    ticks += row.ticks - self._before[who]
            cpu = round(100 * ticks / TICKS / elapsed) if known and elapsed > 0 else None
            figures[name] = Figures(cpu, sum(row.rss for row in rows) * PAGE)
        self._before = seen
        return figures

    def pids(self, name: str) -> frozenset[int]:
        """Of a tree, as of the last look for its members."""
        return frozenset(pid for pid, _ in self._members.get(name, ()))

    def _scan(self, mains: Mapping[str, int], keepers: Mapping[str, int]) -> None:
        rows = [row for entry in os.listdir("/proc") if entry.isdigit() and (row := _read(int(entry)))]  # noqa: PTH208
        children: dict[int, list[_Row]] = {}
        sessions: dict[int, list[_Row]] = {}
        by_pid = {row.pid: row for row in rows}
        for row in rows:
            children.setdefault(row.parent, []).append(row)
            sessions.setdefault(row.session, []).append(row)
        self._members = {}
        for name, main in mains.items():
            found: set[tuple[int, int]] = set()
            queue = [*sessions.get(main, ()), *([by_pid[main]] if main in by_pid else ())]
            # Never of 0: that is everybody.
            if keeper := keepers.get(name, 0):
                queue += children.get(keeper, ())
            while queue:
                row = queue.pop()
                if (row.pid, row.start) not in found:
                    found.add((row.pid, row.start))
                    queue += children.get(row.pid, ())
            self._members[name] = found


def _read(pid: int) -> _Row | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 22 or fields[0] in {b"Z", b"X"}:
        return None
    return _Row(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        ticks=int(fields[11]) + int(fields[12]),
        start=int(fields[19]),
        rss=int(fields[21]),
    )

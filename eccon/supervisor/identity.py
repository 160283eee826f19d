"""Who a process is: its number alone is not enough, numbers are used again."""

import os
from pathlib import Path
from signal import pidfd_send_signal

import msgspec

from eccon import shim

__all__ = ["Identity", "boot_id", "start_ticks", "tree"]


class Identity(msgspec.Struct, frozen=True):
    """A process, of this boot or another one. `start` is in clock ticks since boot."""

    pid: int
    start: int
    boot: str

    def lives(self) -> bool:
        """Whether it is this very process that lives now; a zombie does not."""
        return self.boot == boot_id() and start_ticks(self.pid) == self.start

    def open(self) -> int | None:
        """A pidfd of it, readable when it ends; None when it does not live."""
        try:
            fd = os.pidfd_open(self.pid)
        except (OSError, ValueError):
            return None
        if not self.lives():
            os.close(fd)
            return None
        return fd

    def signal(self, number: int) -> bool:
        """Sends it a signal, and no other process. False when it does not live."""
        fd = self.open()
        if fd is None:
            return False
        try:
            pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True


def tree(main: int) -> set[int]:
    """The process `main`, what descends from it, and whoever is in its session."""
    here = shim.everyone()
    found = {main} | {s.pid for s in here if s.session == main}
    grown = True
    while grown:
        more = {s.pid for s in here if s.parent in found} - found
        found |= more
        grown = bool(more)
    return found


def boot_id() -> str:
    """Of the running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """When `pid` was started; None when it does not live or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {b"Z", b"X"} else int(fields[19])

"""What `ps` shows of a process, set from within: the name, and the command line."""

import ctypes
import os
from pathlib import Path

__all__ = ["kill_tree", "set_title"]

_PR_SET_NAME = 15


def set_title(title: str) -> None:
    """Show `title` instead of the command line, cut to the room that the command line takes.

    The kernel reads the command line from the process's own memory, where it may be written over; vLLM does
    the same by way of setproctitle.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode(), 0, 0, 0)
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, the 48th and 49th field
    room = end - start
    if room > 1:
        ctypes.memmove(start, title.encode()[: room - 1].ljust(room, b"\0"), room)


def kill_tree(parent: int) -> None:
    """SIGKILL to the API server, if it still is our parent, and to ourselves."""
    if os.getppid() == parent:
        os.kill(parent, 9)
    os.kill(os.getpid(), 9)

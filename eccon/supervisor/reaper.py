"""Takes the exit status of every child of the daemon: shims, and orphans that fall to it as PID 1.

Nothing else in the daemon may wait for children.
"""

import asyncio
import os
import signal

__all__ = ["install"]


def install() -> None:
    """Reaps from now on, in the running event loop."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, _reap)
    _reap()


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return

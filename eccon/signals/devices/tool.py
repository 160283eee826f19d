"""Runs a vendor's tool that may hang in its driver: what it says within a time limit, or that it did not."""

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Sequence

from eccon.signals.devices.reading import ToolError

__all__ = ["output_of"]

OUTPUT_MAX = 8 * 2**20
LEAVE_S = 0.5


def output_of(argv: Sequence[str], limit_s: float) -> bytes:
    """All that the tool writes to stdout.

    A tool that cannot even be killed is left behind: nothing here waits for it.

    Raises:
        ToolError: it cannot be run, or does not end in time.
    """
    deadline = time.monotonic() + limit_s
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as e:
        msg = f"{argv[0]} cannot be run: {e.strerror}"
        raise ToolError(msg) from e
    assert process.stdout is not None  # noqa: S101  asked for above
    said = bytearray()
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or len(said) > OUTPUT_MAX:
                process.kill()
                msg = f"{argv[0]} did not end within {limit_s:g} s"
                raise ToolError(msg)
            if select.select([process.stdout], [], [], left)[0]:
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    return bytes(said)
                said += part
    finally:
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)
        if process.returncode is None:
            # Keeps Popen from warning of it.
            process.returncode = -1

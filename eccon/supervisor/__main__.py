"""`python -m eccon.supervisor --config FILE`: the daemon. `--detach FD` is for `start_daemon`."""

import argparse
import asyncio
import contextlib
import gc
import os
import sys
from pathlib import Path


def main() -> int:
    """Exit code 0 at an end that was asked for, 1 when it could not begin."""
    parser = argparse.ArgumentParser(
        prog="python -m eccon.supervisor", description="The daemon of a cluster."
    )
    parser.add_argument("--config", type=Path, required=True, help="eccon.toml")
    parser.add_argument("--linger", type=float, help="end when no console is attached for this many seconds")
    parser.add_argument("--ephemeral", type=Path, help="a directory to remove at the end")
    parser.add_argument("--detach", type=int, metavar="FD", help="fork; tell FD when the control API answers")
    args = parser.parse_args()
    if args.detach is not None and os.fork():
        # The starter waits for this process only; the daemon is nobody's child.
        os._exit(0)
    os.umask(0o022)
    # Imported late: the fork above is cheap only as long as little is loaded. What is imported stays: to look
    # for garbage among it takes a tenth of the start.
    gc.disable()
    from eccon.config import ConfigError  # noqa: PLC0415
    from eccon.paths import PathsError  # noqa: PLC0415
    from eccon.supervisor.daemon import AlreadyRunningError, Daemon  # noqa: PLC0415

    gc.freeze()
    gc.enable()

    async def run() -> None:
        await Daemon(args.config.absolute(), args.linger, args.ephemeral).run(args.detach)

    try:
        asyncio.run(run())
    except (ConfigError, PathsError, AlreadyRunningError, OSError) as e:
        print(e, file=sys.stderr)
        if args.detach is not None:
            with contextlib.suppress(OSError):
                os.write(args.detach, str(e).encode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

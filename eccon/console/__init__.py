"""The Textual console: draws the daemon's state, and sends what the operator asks for.

Importing this package costs nothing: Textual is imported by `run`, when a terminal is known to be there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eccon.console.terminal import refuse_reason

if TYPE_CHECKING:
    from eccon.console.source import Source

__all__ = ["refuse_reason", "run"]


def run(
    client_socket: Path,
    *,
    on_quit_ask: bool = True,
    read_only: bool = False,
    theme: str | None = None,
    source: "Callable[[], Source] | None" = None,
) -> int:
    """Draws the cluster behind the daemon's control socket until the operator leaves.

    Args:
        on_quit_ask: on leaving ask whether the servers are to be stopped; else leave at once.
        read_only: no command is sent to the daemon.
        source: makes what is drawn instead of that daemon: a recording, a proxy alone.
        theme: a theme's name; None for the one last chosen, or the default.

    Returns:
        0; 1 after a crash (its traceback is on the restored screen); 128 + n after signal n;
        2 when this terminal cannot show the console (the reason is on stderr).
    """
    if reason := refuse_reason():
        import sys  # noqa: PLC0415  only here is written

        sys.stderr.write(f"eccon: {reason}\n")
        return 2
    import gc  # noqa: PLC0415  only here is started
    import os  # noqa: PLC0415

    gc.disable()  # until the app has drawn: what is loaded stays for good, looking it through is for nothing
    from eccon.console.opening import begin  # noqa: PLC0415  only here is drawn
    from eccon.console.setup import setup  # noqa: PLC0415

    ready = setup(theme, os.environ)
    opening = None if source else begin(client_socket, ready, read_only=read_only, environ=os.environ)
    try:
        from eccon.console.app import open_on  # noqa: PLC0415  Textual is imported only now

        return open_on(
            client_socket,
            on_quit_ask=on_quit_ask,
            read_only=read_only,
            ready=ready,
            opening=opening,
            source=source,
        )
    finally:
        if opening is not None:
            opening.lower()

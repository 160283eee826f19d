"""What tmux knows of the terminals around it, for pictures that are handed through to them."""

import asyncio
from collections.abc import Mapping

from eccon.console.pictures.answers import Answers

__all__ = ["around"]

WITHIN_S = 3.0


async def around(environ: Mapping[str, str]) -> Answers:
    """The terminal around tmux, when it hands sequences through and all its clients are of one kind.

    tmux asks its clients for their names itself; with passthrough off, or older than 3.3, nothing is said.
    """
    pane = environ.get("TMUX_PANE", "")
    if not environ.get("TMUX") or not pane:
        return Answers()
    command = ["display-message", "-p", "-t", pane, "#{allow-passthrough}"]
    command += [";", "list-clients", "-t", pane, "-F", "#{client_termtype}"]
    try:
        process = await asyncio.create_subprocess_exec(
            "tmux",
            *command,
            env=dict(environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return Answers()
    try:
        out, _ = await asyncio.wait_for(process.communicate(), WITHIN_S)
    except asyncio.TimeoutError:
        return Answers()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    allowed, *names = out.decode(errors="replace").splitlines() or [""]
    one_kind = len(set(names)) == 1 and names[0]
    return Answers(names[0], complete=True) if allowed in ("on", "all", "1") and one_kind else Answers()

"""The console's line to the daemon: state in, requests out. Says when it is lost, and comes back."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from eccon.client import Client, ControlError, NotRunning
from eccon.console.source import OF_RECORDINGS, Problem, Sink

__all__ = ["Link"]

AGAIN_S = (0.2, 0.5, 1.0, 2.0)
"""Waits between tries to reach a daemon that is lost."""

_LOST = (NotRunning, OSError, asyncio.TimeoutError, msgspec.MsgspecError)


class Link:
    """One daemon behind its control socket."""

    flag = ""
    lacks = OF_RECORDINGS

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    def now(self) -> float:
        """The present."""
        return time.time()

    async def watch(self, sink: Sink) -> None:
        """Feeds `sink` for ever."""
        tries = 0
        while True:
            try:
                async with Client(self.socket) as client:
                    async for item in client.changes(console=True):
                        tries = 0
                        sink.connection("")
                        sink.take(item)
                reason = "the daemon closed the connection"
            except ControlError as e:
                reason = str(e)
            except _LOST as e:
                reason = _why(e)
            sink.connection(reason)
            await asyncio.sleep(AGAIN_S[min(tries, len(AGAIN_S) - 1)])
            tries += 1

    async def do(self, action: str, name: str = "") -> str:
        """Asks the daemon to do something; what it did, for the user.

        Raises:
            Problem: it refused, or it cannot be reached.
        """
        try:
            async with Client(self.socket) as client:
                return await _ACTIONS[action](client, name)
        except ControlError as e:
            raise Problem(str(e)) from e
        except _LOST as e:
            raise Problem(_why(e)) from e

    async def read_log(self, name: str, lines: int, take: Callable[[list[str]], None], grep: str = "") -> str:
        """Feeds `take` with lines of a log as it grows, those with `grep`; returns why it ended."""
        try:
            async with Client(self.socket) as client:
                async for text in client.logs(name, lines, follow=True, grep=grep):
                    take(text.rstrip("\r\n").split("\n"))
        except ControlError as e:
            return str(e)
        except _LOST as e:
            return _why(e)
        return "the log ended"

    async def prompt(self, body: bytes, request_id: str) -> AsyncIterator[bytes]:
        """The answer to a chat request, as it comes.

        Raises:
            Problem: it was refused, or the daemon cannot be reached.
        """
        try:
            async with Client(self.socket) as client:
                async for chunk in client.prompt(body, request_id):
                    yield chunk
        except ControlError as e:
            raise Problem(str(e)) from e
        except _LOST as e:
            raise Problem(_why(e)) from e


def _why(error: BaseException) -> str:
    if isinstance(error, msgspec.MsgspecError):
        return f"the daemon speaks another version: {error}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"no daemon answers: {os.strerror(error.errno)}"
    return str(error) or f"no daemon answers: {type(error).__name__}"


async def _restart(client: Client, name: str) -> str:
    await client.restart(name)
    return f"{name} restarts"


async def _start(client: Client, name: str) -> str:
    await client.start(name)
    return f"{name} starts"


async def _stop(client: Client, name: str) -> str:
    await client.stop(name)
    return f"{name} drains and stops"


async def _kill(client: Client, name: str) -> str:
    await client.stop(name, force=True)
    return f"{name} is stopped at once"


async def _remove(client: Client, name: str) -> str:
    await client.remove(name)
    return f"{name} leaves the cluster"


async def _add(client: Client, _name: str) -> str:
    return f"{await client.add()} is added"


async def _up(client: Client, _name: str) -> str:
    await client.up()
    return "the cluster comes up"


async def _down(client: Client, _name: str) -> str:
    await client.down()
    return "the cluster goes down"


async def _reload(client: Client, _name: str) -> str:
    await client.reload()
    return "the configuration is in force"


async def _roll(client: Client, _name: str) -> str:
    await client.roll()
    return "rolling restart begins; the events tell how far it is"


async def _scale(client: Client, count: str) -> str:
    await client.scale(int(count))
    return f"there will be {count} encoders"


async def _drain(client: Client, name: str) -> str:
    await client.drain(name)
    return f"{name} gets no more items"


async def _resume(client: Client, name: str) -> str:
    await client.resume(name)
    return f"{name} gets items again"


async def _diagnostics(client: Client, path: str) -> str:
    """The bundle is private: it is written for its owner only, and never over another file; whole or not."""
    size = 0
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as e:
        raise _unwritten(path, e) from e
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            async for chunk in client.diagnostics():
                size += len(chunk)
                rest = memoryview(chunk)
                try:
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError as e:
                    raise _unwritten(path, e) from e
    except BaseException:
        os.unlink(path)  # noqa: PTH108  as it was opened
        raise
    return f"{size / 2**10:,.0f} KiB in {path}"


def _unwritten(path: str, error: OSError) -> Problem:
    return Problem(f"not written, {error.strerror}: {path}")


async def _shutdown(client: Client, _name: str) -> str:
    await client.shutdown()
    return "the cluster goes down, and its daemon with it"


_ACTIONS = {
    "restart": _restart,
    "start": _start,
    "stop": _stop,
    "kill": _kill,
    "remove": _remove,
    "add": _add,
    "up": _up,
    "down": _down,
    "reload": _reload,
    "roll": _roll,
    "scale": _scale,
    "drain": _drain,
    "resume": _resume,
    "diagnostics": _diagnostics,
    "shutdown": _shutdown,
}

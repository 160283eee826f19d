"""Asynchronous client of the daemon's control API. Imports little, so that commands start fast."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode

import msgspec

from eccon.model import Change, ClusterState

__all__ = ["Address", "Call", "Client", "ControlError", "NotRunning"]

Address: TypeAlias = Path | tuple[str, int]
"""A unix socket, or host and port."""

SILENCE_S = 45.0
"""The daemon says something every 15 s on a stream: a longer silence means that it is gone."""
ANSWER_S = 30.0
HEAD_MAX = 64 * 1024


class ControlError(Exception):
    """The daemon, or the proxy behind it, refused. `status` as in HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NotRunning(Exception):  # noqa: N818  a state of affairs that callers ask for, not only a fault
    """No daemon answers on the socket, or it went away during an answer."""


class Client:
    """One daemon. Each call has its own connection, so calls may run side by side and be cancelled."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path

    async def __aenter__(self) -> "Client":  # noqa: PYI034  Self is 3.11
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held between calls."""

    async def state(self) -> ClusterState:
        """The whole cluster, now. Raises NotRunning, ControlError; so does every other call."""
        return msgspec.json.decode(await self._whole("GET", "/v1/state"), type=ClusterState)

    async def changes(
        self, *, console: bool = False, after: int | None = None
    ) -> AsyncIterator[ClusterState | Change]:
        """The state, then its changes, until the daemon ends. A new state may come in between: take it whole.

        Args: console: counts as a console, for which a lingering daemon stays. after: number of the
        newest change known; the state is not sent when the daemon still has the rest.
        """
        query = {"console": "true"} if console else {}
        query |= {"after": str(after)} if after is not None else {}
        snapshot = msgspec.json.Decoder(ClusterState)
        change = msgspec.json.Decoder(Change)
        async with Call(self.socket_path, "GET", "/v1/events", query) as call:
            await call.expect_success()
            event = b""
            async for line in call.lines(SILENCE_S):
                if line.startswith(b"event: "):
                    event = line[7:]
                elif line.startswith(b"data: "):
                    yield (snapshot if event == b"snapshot" else change).decode(line[6:])

    async def up(self, *, partial: bool = False) -> None:
        """Everything is to run. ControlError with status 409: a port is taken, nothing was started.

        With `partial` such a process is blocked, and the others start.
        """
        await self._command("POST", "/v1/up" + ("?partial=true" if partial else ""))

    async def down(self) -> None:
        """Everything is to stop; the daemon stays."""
        await self._command("POST", "/v1/down")

    async def shutdown(self) -> None:
        """Everything is to stop, and then the daemon."""
        await self._command("POST", "/v1/shutdown")

    async def reload(self) -> None:
        """The configuration is to be read again."""
        await self._command("POST", "/v1/reload")

    async def start(self, name: str) -> None:
        """One process is to run."""
        await self._command("POST", f"/v1/processes/{quote(name, safe='')}/start")

    async def stop(self, name: str, *, force: bool = False) -> None:
        """One process is to stop; an encoder is drained first unless forced."""
        await self._command("POST", f"/v1/processes/{quote(name, safe='')}/stop", force)

    async def restart(self, name: str, *, force: bool = False) -> None:
        """One process is to be started anew; an encoder is drained first unless forced."""
        await self._command("POST", f"/v1/processes/{quote(name, safe='')}/restart", force)

    async def add(self) -> str:
        """One more encoder; its name."""
        return await self._command("POST", "/v1/encoders")

    async def remove(self, name: str, *, force: bool = False) -> None:
        """An encoder is to leave the cluster."""
        await self._command("DELETE", f"/v1/encoders/{quote(name, safe='')}", force)

    async def drain(self, name: str, *, now: bool = False) -> None:
        """An encoder gets no more items until `resume`; with `now`, those in flight go elsewhere at once."""
        await self._command(
            "POST", f"/v1/encoders/{quote(name, safe='')}/drain" + ("?now=true" if now else "")
        )

    async def resume(self, name: str) -> None:
        """An encoder that was drained gets items again."""
        await self._command("POST", f"/v1/encoders/{quote(name, safe='')}/resume")

    async def diagnostics(self) -> AsyncIterator[bytes]:
        """A tar.gz for a report: states, configuration, last logs and requests, secrets masked."""
        async with Call(self.socket_path, "GET", "/v1/diagnostics", {}) as call:
            await call.expect_success()
            async for chunk in call.body(ANSWER_S):
                yield chunk

    async def roll(self) -> None:
        """All encoders are to be restarted, each when the one before serves again."""
        await self._command("POST", "/v1/encoders/restart")

    async def scale(self, count: int) -> None:
        """There are to be `count` encoders."""
        await self._command("POST", f"/v1/encoders/scale?count={count}")

    async def logs(
        self, name: str, lines: int = 200, *, follow: bool = False, grep: str = ""
    ) -> AsyncIterator[str]:
        """The last lines of a process's log, without their ends; with `follow` also what comes.

        With `grep`, only lines that contain it, in upper or lower case.
        """
        query = {"lines": str(lines)} | ({"follow": "true"} if follow else {})
        query |= {"grep": grep} if grep else {}
        async with Call(self.socket_path, "GET", f"/v1/logs/{quote(name, safe='')}", query) as call:
            await call.expect_success()
            async for line in call.lines(None if follow else ANSWER_S):
                yield line.decode(errors="replace")

    async def prompt(self, body: bytes, request_id: str | None = None) -> AsyncIterator[bytes]:
        """A chat completion through the proxy: the answer's bytes as they come."""
        headers = {"content-type": "application/json"} | ({"x-request-id": request_id} if request_id else {})
        async with Call(self.socket_path, "POST", "/v1/prompt", {}, body, headers, None) as call:
            await call.expect_success()
            async for chunk in call.body(None):
                yield chunk

    async def _command(self, method: str, path: str, force: bool = False) -> str:
        data = await self._whole(method, path, {"force": "true"} if force else {})
        return msgspec.json.decode(data, type=_Accepted).name

    async def _whole(self, method: str, path: str, query: dict[str, str] | None = None) -> bytes:
        async with Call(self.socket_path, method, path, query or {}) as call:
            await call.expect_success()
            return b"".join([chunk async for chunk in call.body(ANSWER_S)])


class _Accepted(msgspec.Struct):
    name: str


class _ErrorText(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _ErrorText | str


class Call:
    """One request and its answer, over one connection."""

    def __init__(
        self,
        address: Address,
        method: str,
        path: str,
        query: dict[str, str],
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        patience_s: float | None = ANSWER_S,
    ) -> None:
        self._address = address
        target = path + (f"?{urlencode(query)}" if query else "")
        all_headers = {
            "host": "eccon",
            "connection": "close",
            "content-length": str(len(body)),
            **(headers or {}),
        }
        lines = [f"{method} {target} HTTP/1.1", *(f"{k}: {v}" for k, v in all_headers.items()), "", ""]
        self._request = "\r\n".join(lines).encode() + body
        self._patience_s = patience_s
        """For the answer's head."""
        self._status = 0
        self._headers: dict[str, str] = {}
        self._reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> "Call":  # noqa: PYI034  as above
        try:
            if isinstance(self._address, Path):
                self._reader, self._writer = await asyncio.open_unix_connection(
                    str(self._address), limit=1 << 20
                )
            else:
                self._reader, self._writer = await asyncio.open_connection(*self._address, limit=1 << 20)
        except OSError as e:
            msg = f"no daemon answers on {_shown(self._address)}"
            raise NotRunning(msg) from e
        try:
            self._writer.write(self._request)
            await self._writer.drain()
            await self._head()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as e:
            self._writer.close()
            raise self._gone() from e
        except BaseException:
            self._writer.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    async def _head(self) -> None:
        head = await self._read(self._reader.readuntil(b"\r\n\r\n"), self._patience_s)
        first, *lines = head.decode("latin-1").split("\r\n")
        self._status = int(first.split(" ", 2)[1])
        pairs = (line.partition(":") for line in lines if line)
        self._headers = {name.lower(): value.strip() for name, _, value in pairs}

    async def expect_success(self) -> None:
        """Raises ControlError, with the message in the answer, when it is a refusal."""
        if self._status < 400:
            return
        body = b"".join([chunk async for chunk in self.body(ANSWER_S)])
        message = body.decode(errors="replace")
        with contextlib.suppress(msgspec.DecodeError):
            error = msgspec.json.decode(body, type=_Error).error
            message = error if isinstance(error, str) else error.message
        raise ControlError(message or f"status {self._status}", self._status)

    async def body(self, patience_s: float | None) -> AsyncIterator[bytes]:
        """Pieces as they come. NotRunning when the daemon goes away before the end, or is silent too long."""
        try:
            if self._headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int(
                    (await self._read(self._reader.readuntil(b"\n"), patience_s)).split(b";")[0], 16
                ):
                    yield await self._read(self._reader.readexactly(size), patience_s)
                    await self._reader.readexactly(2)
                return
            left = int(self._headers["content-length"]) if "content-length" in self._headers else None
            while left is None or left > 0:
                chunk = await self._read(self._reader.read(min(left or 1 << 16, 1 << 16)), patience_s)
                if not chunk:
                    if left is None:
                        return
                    raise self._gone()
                left = None if left is None else left - len(chunk)
                yield chunk
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as e:
            raise self._gone() from e

    async def lines(self, patience_s: float | None) -> AsyncIterator[bytes]:
        """Lines as they come, without their ends; the last one may lack it."""
        rest = b""
        async for chunk in self.body(patience_s):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line
        if rest:
            yield rest

    async def _read(self, what: Coroutine[Any, Any, bytes], patience_s: float | None) -> bytes:
        """Ends the connection when nothing comes: `asyncio.wait_for` may lose a cancellation."""
        assert self._writer is not None  # noqa: S101  entered
        if patience_s is None:
            return await what
        timer = asyncio.get_running_loop().call_later(patience_s, self._writer.transport.abort)
        try:
            return await what
        finally:
            timer.cancel()

    def _gone(self) -> NotRunning:
        return NotRunning(f"the daemon on {_shown(self._address)} went away")


def _shown(address: Address) -> str:
    return str(address) if isinstance(address, Path) else f"{address[0]}:{address[1]}"

"""One HTTP/1.1 connection to a server behind the proxy, and one answer on it as it arrives.

Three things that decide whether a PD lives are not told by a general client: whether a connection was a
reused one that died before any byte of an answer, whether it was closed at once when nobody wants the
answer, and how much of a body is held. It also costs less than a third of aiohttp's CPU (83 against
300 µs a small request, measured side by side), which is most of what a request costs here. Parsing is
httptools', as in uvicorn.
"""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

import httptools

from eccon_proxy.plan import Buffer

__all__ = ["Connection", "Response", "UpstreamError"]

Cause = Literal["connect", "refused", "closed", "reset", "timeout", "protocol", "exhausted"]
"""`exhausted`: we had no descriptor or port left to ask with, which says nothing about the server."""
HIGH_WATER = 256 * 1024
"""Bytes of an answer held before the server is made to wait."""


class UpstreamError(Exception):
    """A request that got no whole answer.

    `started` tells that bytes of an answer came; `reused` that the connection had served before.
    """

    def __init__(self, cause: Cause, message: str, *, started: bool = False, reused: bool = False) -> None:
        super().__init__(message)
        self.cause = cause
        self.started = started
        self.reused = reused

    def anew(self) -> "UpstreamError":
        """The same once more: one that is kept and raised would hold what its traceback sees, bodies too."""
        return UpstreamError(self.cause, str(self), started=self.started, reused=self.reused)

    @property
    def stale(self) -> bool:
        """A kept connection that the server had closed: says nothing about the server."""
        return self.reused and not self.started and self.cause in {"closed", "reset"}


class Pool(Protocol):
    """Who keeps connections."""

    def opened(self, connection: "Connection") -> None:
        """A connection was made."""

    def keep(self, connection: "Connection") -> None:
        """A connection is free for the next request."""

    def forget(self, connection: "Connection") -> None:
        """A connection is gone."""


class Response:
    """One answer as it arrives. Read it to its end, or `close` it: that aborts the request."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_held",
        "_waiter",
        "complete",
        "error",
        "headed",
        "headers",
        "reused",
        "status",
    )

    def __init__(self, connection: "Connection", *, reused: bool) -> None:
        self._connection = connection
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._waiter: asyncio.Future[None] | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case."""
        self.headed = False
        """Whether status and headers have come."""
        self.complete = False
        self.error: UpstreamError | None = None
        self.reused = reused

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @property
    def active(self) -> float:
        """Loop time of its last byte, or of its request."""
        return self._connection.active

    @property
    def born(self) -> float:
        """Loop time at which its connection was opened."""
        return self._connection.born

    async def head(self) -> None:
        """Wait for status and headers."""
        while not self.headed:
            if self.error is not None:
                raise self.error.anew()
            await self.wait()

    async def read(self) -> bytes:
        """What has come of the body since, waiting for the next bytes; empty at its end."""
        connection = self._connection
        while not self._chunks:
            if self.error is not None:
                raise self.error.anew()
            if self.complete:
                return b""
            await self.wait()
        chunks = self._chunks
        data = chunks.popleft() if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._held = 0
        connection.resume()
        return data

    async def read_all(self, limit: int) -> bytes | None:
        """The whole body; None when it is longer than `limit` bytes (what came stays to be read)."""
        while not self.complete:
            if self.error is not None:
                raise self.error.anew()
            if self._held > limit:
                return None
            if self._held >= HIGH_WATER:
                self._connection.resume()
            await self.wait()
        return None if self._held > limit else await self.read()

    def silence(self, seconds: float) -> None:
        """Set the longest silence from now on."""
        self._connection.silence(seconds)

    def close(self) -> None:
        """Give up what has not been read; the connection is closed unless the answer was whole."""
        self._connection.abandon(self)

    async def wait(self) -> None:
        """Wait until something of it has happened."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Something has happened (called by the connection)."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def feed(self, data: bytes) -> None:
        """Take bytes of the body (called by the connection)."""
        self._chunks.append(data)
        self._held += len(data)
        if self._held >= HIGH_WATER:
            self._connection.pause()


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    transport: asyncio.Transport

    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._limit = 0.0
        self._deadline = math.inf
        self._paused = False
        self._keep = False
        self._head_done = False
        self.response: Response | None = None
        self.used = False
        self.lost = False
        self.born = loop.time()
        self.idle_since = 0.0
        self.active = 0.0
        """Loop time of the last byte of an answer, or of its request."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.response is None:  # a server that speaks out of turn
            self._drop()
            return
        self.active = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("protocol", f"not HTTP: {error}")
            self._drop()
        except httptools.HttpParserUpgrade:
            self._fail("protocol", "the server switched protocols")
            self._drop()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._pool.forget(self)
        response = self.response
        if response is None or response.complete:
            return
        if self._head_done and not self._framed and exc is None:
            self.on_message_complete()  # HTTP/1.0: the end of the connection is the end of the body
        elif exc is None:
            self._fail("closed", "the server closed the connection")
        else:
            self._fail("reset", f"the connection broke: {type(exc).__name__}")

    # one request

    def begin(self, head: bytes, body: Sequence[Buffer], silence: float, total: float) -> Response:
        """Send a request; the answer is to be awaited by `headers`."""
        response = Response(self, reused=self.used)
        self.response = response
        self.used = True
        self._parser = httptools.HttpResponseParser(self)
        self._head_done = self._framed = self._keep = False
        self.active = self._loop.time()
        self._limit = silence
        self._deadline = self.active + total
        self._timer = self._loop.call_later(min(silence, total), self._expire)
        if len(body) == 1 and len(body[0]) < 65536:
            self.transport.write(head + body[0])
        else:
            self.transport.writelines((head, *body))
        return response

    def silence(self, seconds: float) -> None:
        """Change the longest silence; a timer that is due later looks again then."""
        if seconds < self._limit and self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_later(seconds, self._expire)
        self._limit = seconds

    def _expire(self) -> None:
        response = self.response
        if response is None or response.complete:
            return
        # One timer a request: bytes only note their time, and the timer looks when it was due.
        now = self._loop.time()
        left = min(self._limit if self._paused else self.active + self._limit - now, self._deadline - now)
        if left > 0.001:
            self._timer = self._loop.call_later(left, self._expire)
        elif now >= self._deadline - 0.001:
            self._fail("timeout", "no whole answer in time")
            self._drop()
        else:
            self._fail("timeout", f"no byte for {self._limit:g} s")
            self._drop()

    def _fail(self, cause: Cause, message: str) -> None:
        response = self.response
        if response is not None and not response.complete and response.error is None:
            started = response.status != 0
            response.error = UpstreamError(cause, message, started=started, reused=response.reused)
            response.wake()

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.response is not None:
            name = name.lower()
            self.response.headers.append((name, value))
            if name in {b"content-length", b"transfer-encoding"}:
                self._framed = True

    def on_message_begin(self) -> None:
        if self.response is None:
            self._drop()  # a second answer to one request: nothing after it can be trusted
        elif not self._head_done:
            self.response.status = -1

    def on_headers_complete(self) -> None:
        response = self.response
        if response is None:
            return
        status = self._parser.get_status_code()
        if status < 200 and status != 101:
            response.headers.clear()
            self._framed = False
            return
        response.status = status
        if status in {204, 304}:
            self._framed = True
        self._head_done = True
        response.headed = True
        response.wake()

    def on_body(self, data: bytes) -> None:
        if self.response is not None:
            self.response.feed(data)
            self.response.wake()

    def on_message_complete(self) -> None:
        response = self.response
        if response is None or not self._head_done:
            return
        response.complete = True
        self._keep = self._framed and not self.lost and self._parser.should_keep_alive()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.response = None
        response.wake()
        self._release()

    # life

    def _release(self) -> None:
        transport = self.transport
        if not self._keep or transport.get_write_buffer_size():
            self._drop()
            return
        if self._paused:
            self._paused = False
            transport.resume_reading()
        self.idle_since = self._loop.time()
        self._pool.keep(self)

    def abandon(self, response: Response) -> None:
        """Nobody wants this answer any more."""
        if self.response is response:
            self.response = None
            self._drop()

    def _drop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.lost:
            self.transport.abort()

    def drop(self) -> None:
        """Close at once."""
        self._drop()

    def pause(self) -> None:
        """Let the server wait: the reader is behind."""
        if not self._paused and not self.lost:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused and not self.lost:
            self._paused = False
            self.active = self._loop.time()
            self.transport.resume_reading()

"""Programmable upstreams on raw asyncio sockets: what a vLLM server does, and all it should not do.

A `Fake` answers each request with a `Handler`, which may write half an answer, reset, hang, frame
wrongly or trickle; it records method, path, headers, body and times, and when the peer closed.
"""

import asyncio
import contextlib
import hashlib
import json
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CHAT", "Exchange", "Fake", "Handler", "PeerGoneError", "Seen", "hang", "reset", "shut"]

CHAT = "/v1/chat/completions"
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 429: "Too Many Requests"}
Headers = Iterable[tuple[str, str]]


class PeerGoneError(Exception):
    """The peer closed the connection while we were answering."""


@dataclass(eq=False)
class Seen:
    """One request as it arrived; times are those of `time.monotonic()`."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    """Names in lower case, in order of arrival, repeated ones kept."""
    body: bytes
    at: float
    connection: int
    """Serial number of the connection at this server: two requests with one number shared a socket."""
    done_at: float | None = None
    """When our whole answer was handed to the socket."""
    closed_at: float | None = None
    """When the peer closed before our answer was whole."""

    @property
    def digest(self) -> str:
        """SHA-256 of the body."""
        return hashlib.sha256(self.body).hexdigest()

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name.lower()]

    def header(self, name: str) -> str | None:
        """The one value of a header; fails when it came more than once."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} came {len(values)} times: {values}"
        return values[0] if values else None

    def json(self) -> Any:
        """The body as Python's json reads it: the last of doubled keys wins, as in vLLM."""
        return json.loads(self.body)


class Exchange:
    """One request and the means to answer it, byte by byte."""

    def __init__(self, connection: "_Connection", seen: Seen) -> None:
        self._connection = connection
        self.seen = seen
        self.complete = False

    @property
    def peer_gone(self) -> bool:
        """Whether the peer has closed its side."""
        return self._connection.gone.is_set()

    async def send(self, data: bytes) -> None:
        """Write bytes as they are and wait until the socket takes more."""
        if self.peer_gone:
            raise PeerGoneError
        self._connection.transport.write(data)
        await self._connection.drained()

    async def start(
        self,
        status: int = 200,
        headers: Headers = (("content-type", "text/event-stream; charset=utf-8"),),
        *,
        length: int | None = None,
    ) -> None:
        """Send the head of an answer: chunked unless `length` bytes are promised."""
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Whatever')}"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines.append("transfer-encoding: chunked" if length is None else f"content-length: {length}")
        await self.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        """Send one HTTP chunk."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def finish(self) -> None:
        """Send the last chunk: the answer is whole."""
        self._whole()
        await self.send(b"0\r\n\r\n")

    async def answer(
        self, status: int, body: bytes, headers: Headers = (("content-type", "application/json"),)
    ) -> None:
        """Send a whole answer with its length."""
        await self.start(status, headers, length=len(body))
        self._whole()
        if body and self.seen.method != "HEAD":
            await self.send(body)

    async def json(self, status: int, value: object, headers: Headers = ()) -> None:
        """Send a whole JSON answer."""
        await self.answer(
            status, json.dumps(value).encode(), [("content-type", "application/json"), *headers]
        )

    async def error(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        """Send an error in vLLM's shape."""
        await self.json(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})

    async def until_gone(self) -> None:
        """Wait until the peer closes."""
        await self._connection.gone.wait()

    def reset(self) -> None:
        """End the connection with a TCP RST."""
        self._connection.reset()

    def close(self) -> None:
        """End the connection with a FIN."""
        self._connection.transport.close()

    def _whole(self) -> None:
        self.complete = True
        self.seen.done_at = time.monotonic()


Handler = Callable[[Exchange], Awaitable[None]]


async def hang(exchange: Exchange) -> None:
    """Accept and never answer."""
    await exchange.until_gone()


async def reset(exchange: Exchange) -> None:
    """Answer with a TCP RST."""
    exchange.reset()


async def shut(exchange: Exchange) -> None:
    """Close without a byte."""
    exchange.close()


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, fake: "Fake", number: int) -> None:
        self.fake = fake
        self.number = number
        self.gone = asyncio.Event()
        self.current: Exchange | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._buffer = bytearray()
        self._head: tuple[str, str, tuple[tuple[str, str], ...]] | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.fake.connections.add(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        self.fake.connections.discard(self)
        self._peer_left()

    def eof_received(self) -> bool:
        self._peer_left()
        return False

    def _peer_left(self) -> None:
        if not self.gone.is_set():
            self.gone.set()
            self._writable.set()
            if self.current is not None and not self.current.complete:
                self.current.seen.closed_at = time.monotonic()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def drained(self) -> None:
        await self._writable.wait()
        if self.gone.is_set():
            raise PeerGoneError

    def reset(self) -> None:
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self.current is None:
            self._next()

    def _next(self) -> None:
        if self._head is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
            del self._buffer[: end + 4]
            method, path, _version = first.split(" ", 2)
            pairs = (line.split(":", 1) for line in lines)
            self._head = (method, path, tuple((name.lower(), value.strip()) for name, value in pairs))
        method, path, headers = self._head
        body = self._take_body(dict(headers))
        if body is None:
            return
        self._head = None
        seen = Seen(method, path, headers, body, time.monotonic(), self.number)
        self.fake.seen.append(seen)
        self.current = Exchange(self, seen)
        self._task = asyncio.get_running_loop().create_task(self._serve(self.current))
        self.fake.tasks.add(self._task)
        self._task.add_done_callback(self.fake.tasks.discard)

    def _take_body(self, headers: dict[str, str]) -> bytes | None:
        if "transfer-encoding" in headers:
            assert "content-length" not in headers, "two framings in one request"
            return self._take_chunks()
        length = int(headers.get("content-length", "0"))
        if len(self._buffer) < length:
            return None
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return body

    def _take_chunks(self) -> bytes | None:
        parts, at = [], 0
        while True:
            end = self._buffer.find(b"\r\n", at)
            if end < 0:
                return None
            size = int(bytes(self._buffer[at:end]).split(b";")[0], 16)
            if len(self._buffer) < end + 2 + size + 2:
                return None
            parts.append(bytes(self._buffer[end + 2 : end + 2 + size]))
            at = end + 2 + size + 2
            if size == 0:
                del self._buffer[:at]
                return b"".join(parts)

    async def _serve(self, exchange: Exchange) -> None:
        try:
            await self.fake.handler(exchange.seen)(exchange)
        except PeerGoneError:
            pass
        except Exception as error:  # noqa: BLE001  shown at the end of the case, where it fails it
            self.fake.errors.append(error)
            self.transport.abort()
        finally:
            self.current = None
        if not exchange.complete:
            self.transport.close()
        elif not self.gone.is_set() and self._buffer:
            self._next()


@dataclass(eq=False)
class Fake:
    """One upstream server. `routes` hold what stays, `once` what the next requests of a route get."""

    name: str
    port: int = 0
    """0 until started; kept over a stop and a start."""
    routes: dict[tuple[str, str], Handler] = field(default_factory=dict)
    once: dict[tuple[str, str], deque[Handler]] = field(default_factory=dict)
    anything: Handler | None = None
    """Answers every request while set: a process that is stopped, say."""
    seen: list[Seen] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    connections: set[_Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    accepted: int = 0
    tls: ssl.SSLContext | None = None
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def listening(self) -> bool:
        """Whether it takes connections."""
        return self._server is not None

    @property
    def busy(self) -> int:
        """Requests that are being answered."""
        return sum(connection.current is not None for connection in self.connections)

    def requests(self, path: str = CHAT, method: str = "POST") -> list[Seen]:
        """What came on one route, in order of arrival."""
        return [seen for seen in self.seen if seen.method == method and seen.path.split("?")[0] == path]

    def then(self, *handlers: Handler, path: str = CHAT, method: str = "POST") -> None:
        """Give the next requests of a route to these handlers, one each."""
        self.once.setdefault((method, path), deque()).extend(handlers)

    def always(self, handler: Handler, path: str = CHAT, method: str = "POST") -> None:
        """Give every request of a route to this handler."""
        self.routes[method, path] = handler

    def handler(self, seen: Seen) -> Handler:
        """Who answers this request."""
        if self.anything is not None:
            return self.anything
        key = (seen.method, seen.path.split("?")[0])
        if self.once.get(key):
            return self.once[key].popleft()
        return self.routes.get(key, _not_found)

    def _connect(self) -> _Connection:
        self.accepted += 1
        return _Connection(self, self.accepted)

    async def start(self) -> None:
        """Listen, on the port of the life before if there was one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._connect, "127.0.0.1", self.port, backlog=4096, reuse_address=True, ssl=self.tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self, *, abort: bool = False) -> None:
        """Stop listening and drop every connection, by RST when `abort`: a process that was killed."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self.drop(abort=abort)
        for task in tuple(self.tasks):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self.tasks, return_exceptions=True)
        while self.connections:
            # One that was accepted just before the listener closed may only now be there.
            self.drop(abort=abort)
            await asyncio.sleep(0.001)

    def drop(self, *, abort: bool = False, busy: bool = False) -> None:
        """End every connection, or only those with a request on them; the listener stays."""
        for connection in tuple(self.connections):
            if busy and connection.current is None:
                continue
            if abort:
                connection.reset()
            else:
                connection.transport.abort()


async def _not_found(exchange: Exchange) -> None:
    await exchange.json(404, {"detail": "Not Found"})

"""uvicorn's protocol on sockets bound by us (see `sockets`), with the limits it lacks.

uvicorn's own server is not used: it handles signals (two of them in one loop would overwrite each
other's handlers), makes unix sockets open to everybody, and waits for ever for half a header.
"""

import asyncio
import http
import re
import socket
import ssl
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from eccon_proxy.acceptor import Acceptor
from eccon_proxy.errors import error_body
from eccon_proxy.settings import Settings

__all__ = ["Listener"]

KEEP_ALIVE = 75
JOIN_BELOW = 65536
"""Bytes of a body that are copied behind their head; more are handed over apart."""
LINGER_SECONDS = 10.0
LINGER_SILENCE = 2.0
"""After an answer that came before the request was whole, its rest is read and dropped: for so long in all,
and no longer than this without a byte. A close at once would be a reset, and hide the answer."""
SURPLUS_SECONDS = 3.0
"""How long a client beyond the cap may take to send what it will not be answered."""
SURPLUS_LEAST, SURPLUS_SHARE = 16, 8
"""Of them so many, or this share of the cap, are told at once; the others wait in the kernel's queue."""
IGNORED = b"\r\nproxy-connection:"
_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with time and size limits on what a client sends, and errors in OpenAI's shape."""

    settings: Settings
    on_lost: Callable[[], None] | None = None
    """Called when the client is gone: what serves it needs no task of its own to wait for that."""
    _timer: asyncio.TimerHandle | None = None
    _in_head = False
    _in_body = False
    _head_bytes = 0
    _heard_at = 0.0
    _lingers_until = 0.0
    """Loop time until which what comes is dropped; 0 while it is not."""
    _surplus = False
    """Whether it came beyond the cap on connections."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            # Told when its request has come: a close while it still sends would hide the answer from it.
            self._surplus = True
            self._timer = self.loop.call_later(SURPLUS_SECONDS, self._send_away)
            return
        self._arm(self.settings.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._lingers_until:
            self._heard_at = self.loop.time()
            return
        super().data_received(data if self._in_body else _without_upgrade(data))
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.settings.max_header:
                self._refuse(431, "The header is too long")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["eccon.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._in_head = True
        self._head_bytes = 0
        if self._surplus:
            return
        if self._timer is None:
            self._arm(self.settings.header_timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers come here too; they are no headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._in_body = True
        if self._surplus:
            return
        if self.parser.get_http_version() not in {"1.0", "1.1"}:
            self._refuse(400, "HTTP/1.1 is spoken here")
            return
        if sum(len(name) + len(value) for name, value in self.headers) > self.settings.max_header:
            self._refuse(431, "The header is too long")
            return
        self._disarm()
        super().on_headers_complete()
        self.cycle.transport = _Cork(self.transport, self.loop, self)  # type: ignore[assignment]
        # The routes answer a late body themselves; this ends what no route reads.
        self._arm(self.settings.body_timeout + 1.0)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._disarm()
        if self._surplus:
            self._send_away(whole=True)
            return
        if not self.transport.is_closing() and self.cycle is not None:
            super().on_message_complete()
            if not self.pipeline:
                # uvicorn stops reading within a body of some size and goes on when more of it is asked for.
                # There is no more of it; who does not read does not see that the client leaves.
                self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        if not self._surplus and not self.transport.is_closing() and self.cycle is not None:
            super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _arm(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_away(self, *, whole: bool = False) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse(503, "Too many connections", linger=not whole)

    def _late(self) -> None:
        self._timer = None
        cycle: RequestResponseCycle | None = self.cycle
        if self._in_head or (cycle is not None and not cycle.response_started):
            self._refuse(408, "The request did not come in time")
        else:
            self.transport.close()

    def close_after(self) -> None:
        """Close when what the client still sends has been read."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or not cycle.more_body:
            self.transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        self._disarm()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._heard_at = self.loop.time()
        self._lingers_until = self._heard_at + LINGER_SECONDS
        self._timer = self.loop.call_later(LINGER_SILENCE, self._lingered)

    def _lingered(self) -> None:
        self._timer = None
        now = self.loop.time()
        left = min(self._lingers_until, self._heard_at + LINGER_SILENCE) - now
        if left < 0.01:
            self.transport.close()
        else:
            self._timer = self.loop.call_later(left, self._lingered)

    def _refuse(self, status: int, message: str, *, linger: bool = False) -> None:
        kind = "invalid_request_error" if status < 500 else "overloaded_error"
        body = error_body(message, kind, "busy" if status == 503 else status)
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
            status, http.HTTPStatus(status).phrase.encode(), len(body),
        )  # fmt: skip
        self.transport.write(b"%b%bconnection: close\r\n\r\n%b" % (head, retry, body))
        self._in_head = False
        if linger:
            self._linger()
        else:
            self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """The head of a request, with its wish for another protocol under a name that nobody reads.

    Some clients offer HTTP/2 on each request of theirs, Java's own among them, and the parser takes what
    follows such a head for that protocol's: the body would be lost. A server may ignore the wish.
    """
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    found = _UPGRADE.search(head)
    return data if found is None else b"%b%b%b" % (data[: found.start()], IGNORED, data[found.end() :])


class _Cork:
    """Holds the head of an answer for one turn of the loop, so that it leaves with its body in one packet."""

    __slots__ = ("_head", "_loop", "_open", "_protocol", "_transport")

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, protocol: _Protocol
    ) -> None:
        self._transport = transport
        self._protocol = protocol
        self._loop = loop
        self._head = b""
        self._open = False

    def write(self, data: bytes) -> None:
        if self._open:
            self._transport.write(data)
        elif not self._head:
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._open = True
            if len(data) < JOIN_BELOW:
                self._transport.write(self._head + data)
            else:
                self._transport.writelines((self._head, data))

    def _flush(self) -> None:
        if not self._open and self._head:
            self._open = True
            self._transport.write(self._head)

    def close(self) -> None:
        self._flush()
        self._protocol.close_after()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class Listener:
    """One application on one socket."""

    def __init__(
        self, app: Any, sock: socket.socket, settings: Settings, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._sock = sock
        self._tls = tls
        self._state = ServerState()
        self._settings = settings
        self._config = uvicorn.Config(
            app,
            http=_Protocol,
            loop="none",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
        )
        self._acceptor: Acceptor | None = None
        self._clock: asyncio.Task[None] | None = None

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._state.connections)

    async def start(self) -> None:
        """Begin to accept."""
        self._config.load()
        protocol = type("Protocol", (_Protocol,), {"settings": self._settings})
        loop = asyncio.get_running_loop()

        def connect() -> asyncio.Protocol:
            return protocol(config=self._config, server_state=self._state, app_state={})  # type: ignore[no-any-return]

        most = self._settings.max_connections
        self._acceptor = Acceptor(
            self._sock,
            connect,
            self._state.connections,
            most + max(SURPLUS_LEAST, most // SURPLUS_SHARE),
            tls=self._tls,
            handshake_timeout=self._settings.header_timeout,
        )
        self._acceptor.start()
        self._clock = loop.create_task(self._tell_date())

    async def _tell_date(self) -> None:
        while True:
            self._state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]
            await asyncio.sleep(1.0)

    def stop_accepting(self) -> None:
        """Close the listening socket and idle connections; requests under way go on."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        for connection in tuple(self._state.connections):
            connection.shutdown()

    async def finish(self, seconds: float) -> None:
        """Wait so long for the connections to end, then end them."""
        self.stop_accepting()
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (self._state.connections or self._state.tasks) and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # uvicorn keeps plain sets: nothing to wait for
        for connection in tuple(self._state.connections):
            connection.transport.abort()
        if self._clock is not None:
            self._clock.cancel()
        tasks = tuple(self._state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

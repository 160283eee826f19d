"""One server behind the proxy: its address and its kept connections."""

import asyncio
import errno
import math
from collections.abc import Sequence
from urllib.parse import urlsplit

from eccon_proxy.connection import Connection, Response, UpstreamError
from eccon_proxy.plan import Buffer
from eccon_proxy.tls import client_context

__all__ = ["Response", "Upstream", "UpstreamError"]

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
IDLE_SECONDS = 4.0
"""vLLM closes idle connections after 5 s; ours go before, so that a request seldom meets the close."""


class Upstream:
    """One server: its address and its kept connections."""

    def __init__(self, url: str, *, connect_timeout: float, ca: str = "") -> None:
        parts = urlsplit(url)
        self.url = url
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = client_context(ca) if parts.scheme == "https" else None
        self._path = parts.path.encode("latin-1")
        self._authority = parts.netloc.encode("latin-1")
        self._connect_timeout = connect_timeout
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """Open connections, kept ones included."""
        return len(self._all)

    def head(self, method: bytes, path: bytes, headers: bytes, length: int) -> bytes:
        """The head of a request; `headers` are whole lines."""
        return b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            method, self._path, path, self._authority, headers, length,
        )  # fmt: skip

    async def request(
        self,
        method: bytes,
        path: bytes,
        headers: bytes = b"",
        body: Sequence[Buffer] = (),
        *,
        timeout: float,
        total: float = math.inf,
        fresh: bool = False,
    ) -> Response:
        """Send a request and return its answer when status and headers have come.

        `timeout` is the longest silence, `total` the longest whole answer, in seconds. `fresh` takes
        no kept connection. Raises
        `UpstreamError`; when cancelled, the connection is closed.
        """
        connection = None if fresh else self._take()
        if connection is None:
            connection = await self._connect()
        length = 0
        for part in body:
            length += len(part)
        response = connection.begin(self.head(method, path, headers, length), body, timeout, total)
        try:
            await response.head()
        except BaseException:
            response.close()
            raise
        return response

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost and not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(self, loop)
        # Not wait_for: before Python 3.12 it loses a cancellation that meets the result.
        making = loop.create_task(
            loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
        )
        try:
            await asyncio.wait({making}, timeout=self._connect_timeout)
        except asyncio.CancelledError:
            self._unmake(making, connection)
            raise
        if not making.done():
            self._unmake(making, connection)
            message = f"no connection to {self.url} within {self._connect_timeout:g} s"
            raise UpstreamError("connect", message)
        error = making.exception()
        if isinstance(error, ConnectionRefusedError):
            raise UpstreamError("refused", f"{self.url} refuses connections")
        if isinstance(error, OSError) and error.errno in _OURS:
            raise UpstreamError("exhausted", f"no connection to {self.url}: {error}")
        if isinstance(error, OSError):
            raise UpstreamError("connect", f"no connection to {self.url}: {error}")
        if error is not None:
            raise error
        return connection

    def _unmake(self, making: "asyncio.Task[object]", connection: Connection) -> None:
        making.cancel()
        if connection in self._all:  # made in the very moment nobody wanted it any more
            connection.drop()

    def opened(self, connection: Connection) -> None:
        """A connection was made."""
        self._all.add(connection)

    def keep(self, connection: Connection) -> None:
        """Take a connection back for the next request."""
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(1.0, self._close_idle)

    def forget(self, connection: Connection) -> None:
        """A connection is gone."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - IDLE_SECONDS + 1.0
        for connection in [c for c in self._idle if c.idle_since < oldest]:
            self._idle.remove(connection)
            connection.drop()
        self._sweep = loop.call_later(1.0, self._close_idle) if self._idle else None

    def drop_idle(self) -> None:
        """Close every kept connection."""
        while self._idle:
            self._idle.pop().drop()

    def close(self) -> None:
        """Close every connection, answers under way included."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self._idle.clear()
        for connection in tuple(self._all):
            connection.drop()

"""Takes in connections, and never more than there are descriptors for.

The event loop's own server takes in all that come; out of descriptors, libuv closes those that wait,
unanswered. Here they wait in the kernel's queue until one that is served has gone.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sized

__all__ = ["Acceptor"]

BACKLOG = 4096
AT_ONCE = 64
"""Connections taken in before others get their turn."""
PAUSE_SECONDS = 0.02

logger = logging.getLogger(__name__)


class Acceptor:
    """One listening socket, which it closes at the end."""

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        connections: Sized,
        most: int,
        *,
        tls: ssl.SSLContext | None = None,
        handshake_timeout: float | None = None,
    ) -> None:
        self._sock = sock
        self._protocol = protocol
        self._connections = connections
        self._most = most
        self._tls = tls
        self._handshake_timeout = handshake_timeout if tls is not None else None
        self._loop = asyncio.get_running_loop()
        self._coming: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._said = False

    def start(self) -> None:
        """Listen."""
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Stop listening; connections stay as they are."""
        if self._pause is not None:
            self._pause.cancel()
        elif self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock.fileno(), self._ready)

    def _wait(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._pause = self._loop.call_later(PAUSE_SECONDS, self._resume)

    def _ready(self) -> None:
        for _ in range(AT_ONCE):
            if len(self._connections) + len(self._coming) >= self._most:
                self._wait()
                return
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if not self._said:  # once, not fifty times a second
                    self._said = True
                    logger.warning("connections have to wait: %s", error.strerror)
                self._wait()
                return
            self._said = False
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._take(sock))
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)

    async def _take(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocol, sock, ssl=self._tls, ssl_handshake_timeout=self._handshake_timeout
            )
        except (OSError, asyncio.TimeoutError) as error:  # gone, or no TLS
            logger.debug("a connection did not come about: %s", error)
            sock.close()

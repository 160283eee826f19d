"""GET over one kept connection, for probes: a pooled general client costs several times as much a second.

Time limits end the connection instead of cancelling the read: `asyncio.wait_for` may lose a cancellation.
Understands what servers of HTTP/1.1 answer to a GET: a length, chunks, or a body until the end.
"""

import asyncio
import contextlib
import ssl

__all__ = ["BODY_MAX", "Getter"]

BODY_MAX = 1 << 20
HEAD_MAX = 1 << 16


class Getter:
    """One server. One request at a time: a second one waits.

    Args:
        host, port: where.
        tls: over TLS.
        ours: a child of this daemon, on this machine: its certificate names the host that clients know, and
            is not asked about.
    """

    def __init__(self, host: str, port: int, *, tls: bool = False, ours: bool = False) -> None:
        self.host = host
        self.port = port
        self._tls = ssl.create_default_context() if tls else None
        if self._tls is not None and ours:
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._turn = asyncio.Lock()
        self._late = False
        self._connecting: asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]] | None = None

    async def get(self, path: str, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
        """Status and body.

        Raises:
            asyncio.TimeoutError: no whole answer in time.
            ConnectionRefusedError: nothing listens.
            OSError, EOFError, ValueError: the connection broke, or what came is not HTTP.
        """
        async with self._turn:
            self._late = False
            timer = asyncio.get_running_loop().call_later(timeout_s, self._too_late)
            try:
                return await self._get(path, headers)
            except (OSError, EOFError) as e:
                if self._late:
                    raise asyncio.TimeoutError from e
                raise
            finally:
                timer.cancel()

    def _too_late(self) -> None:
        self._late = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._writer is not None:
            self._writer.transport.abort()

    def close(self) -> None:
        """Lets go of the connection."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _get(self, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        lines = [f"GET {path} HTTP/1.1", f"host: {self.host}:{self.port}", "accept: */*"]
        lines += [f"{k}: {v}" for k, v in headers.items()]
        request = ("\r\n".join(lines) + "\r\n\r\n").encode()
        reused = self._writer is not None
        try:
            try:
                return await self._exchange(request)
            except (OSError, EOFError):
                if not reused or self._late:
                    raise
                # The server ended the idle connection meanwhile: that says nothing of its health.
                self.close()
                return await self._exchange(request)
        except BaseException:
            self.close()
            raise

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await self._connect()
        self._writer.write(request)
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError as e:
            msg = "a head without end"
            raise ValueError(msg) from e
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1"):
            msg = "not HTTP"
            raise ValueError(msg)
        fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        body, whole = await self._body(self._reader, fields)
        if not whole or version == "HTTP/1.0" or fields.get("connection", "").lower() == "close":
            self.close()
        return int(rest[:3]), body

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._connecting = asyncio.ensure_future(
            asyncio.open_connection(self.host, self.port, limit=HEAD_MAX, ssl=self._tls)
        )
        try:
            await asyncio.wait({self._connecting})
            if self._late:
                msg = "not connected in time"
                raise ConnectionError(msg)
            return self._connecting.result()
        finally:
            self._connecting.cancel()
            self._connecting = None

    @staticmethod
    async def _body(reader: asyncio.StreamReader, fields: dict[str, str]) -> tuple[bytes, bool]:
        """The body, and whether the connection may be used again."""
        if "content-length" in fields:
            length = int(fields["content-length"])
            return await reader.readexactly(min(length, BODY_MAX)), length <= BODY_MAX
        body = bytearray()
        if fields.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await reader.readline()).split(b";")[0], 16):
                body += await reader.readexactly(min(size, BODY_MAX))
                if len(body) >= BODY_MAX:
                    return bytes(body), False
                await reader.readline()
            await reader.readline()
            return bytes(body), True
        with contextlib.suppress(asyncio.IncompleteReadError):
            while len(body) < BODY_MAX and (part := await reader.read(1 << 16)):
                body += part
        return bytes(body), False

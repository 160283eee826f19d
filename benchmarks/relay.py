"""The floor: bytes from a client to one server and back on uvloop, without looking at any of them.

`python benchmarks/relay.py PORT SERVER_PORT`: what is left of a proxy in Python when it does nothing at all
but its two reads and two writes. No proxy in Python can cost less; run it with `proxies.py --relay`.
"""

import asyncio
import sys
from typing import cast

import uvloop


class Side(asyncio.Protocol):
    """One end; writes what it reads to the other."""

    def __init__(self, server: int = 0) -> None:
        self.server = server
        self.other: Side | None = None
        self.transport: asyncio.Transport | None = None
        self.early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self.server:
            self.making = asyncio.ensure_future(self.join())

    async def join(self) -> None:
        """Connect to the server."""
        loop = asyncio.get_running_loop()
        _, other = await loop.create_connection(Side, "127.0.0.1", self.server)
        self.other, other.other = other, self
        if other.transport is not None and self.early:
            other.transport.write(self.early)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)
        else:
            self.early += data

    def connection_lost(self, _exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


async def main() -> None:
    """Listens until it is ended."""
    port, server = int(sys.argv[1]), int(sys.argv[2])
    await asyncio.get_running_loop().create_server(lambda: Side(server), "127.0.0.1", port, backlog=1024)
    await asyncio.Event().wait()


uvloop.run(main())

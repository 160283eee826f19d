"""A load generator on raw asyncio sockets: so little work that it is not what is measured."""

import asyncio
import time
from dataclasses import dataclass, field

__all__ = ["Result", "drive", "request"]


def request(body: bytes, port: int) -> bytes:
    """A whole chat request as sent on the wire."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass
class Result:
    """Of one run. Seconds."""

    latencies: list[float] = field(default_factory=list)
    bad: int = 0

    def percentile(self, p: float) -> float:
        """The p-th (0 to 100) of the latencies; 0 without any."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))] if ordered else 0.0


async def read_answer(reader: asyncio.StreamReader) -> int:
    """Reads one whole answer off a keep-alive connection; its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head[9:12])
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        while True:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            await reader.readexactly(size + 2)
            if size == 0:
                return status
    at = lower.find(b"content-length:")
    await reader.readexactly(int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0)
    return status


async def drive(port: int, body: bytes, *, connections: int, requests: int) -> Result:
    """`requests` of the same body over `connections` keep-alive connections, each one after the other."""
    wire = request(body, port)
    result = Result()
    left = requests

    async def one() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        try:
            while left > 0:
                left -= 1
                start = time.perf_counter()
                writer.write(wire)
                await writer.drain()
                status = await read_answer(reader)
                result.latencies.append(time.perf_counter() - start)
                result.bad += status != 200
        finally:
            writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    return result

"""Forty requests of four megabytes at once: health and streams of others go on, and the memory comes back."""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.fakes import CHAT
from tests.proxy.support import Proxy, body_of, eventually, text, wait_for

ROOT = Path(__file__).parents[2]
REQUESTS = 40
# Clients and servers are processes of their own: what is measured here is the proxy.
CLIENTS = f"""
import asyncio, json, sys

PART = {{"type": "image_url", "image_url": {{"url": "data:image/png;base64," + "A" * 4_000_000}}}}
BODY = json.dumps({{"model": "m", "messages": [{{"role": "user", "content": [PART]}}]}}).encode()
HEAD = b"POST {CHAT} HTTP/1.1\\r\\nhost: a\\r\\nconnection: close\\r\\ncontent-type: application/json\\r\\n"

async def one(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"content-length: %d\\r\\n\\r\\n" % len(BODY) + BODY)
    answer = await reader.read()
    writer.close()
    return answer[9:12].decode()

async def main():
    print(*await asyncio.gather(*(one(int(sys.argv[1])) for _ in range({REQUESTS}))))

asyncio.run(main())
"""


def ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for first in range(21_000, 31_000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no ports")


@contextlib.asynccontextmanager
async def running(*argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is ended at the end."""
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@dataclass(frozen=True)
class Wait:
    """Seconds that somebody waited: by the clock, and of the proxy's own CPU meanwhile."""

    wall: float
    cpu: float


class Watch:
    """Measures waits for one proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self._process = psutil.Process(proxy.process.pid)
        self._at = self._now()

    def _now(self) -> Wait:
        times = self._process.cpu_times()
        return Wait(time.monotonic(), times.user + times.system)

    def begin(self) -> None:
        """Begin to wait."""
        self._at = self._now()

    def end(self) -> Wait:
        """What it was, and begin anew."""
        at, self._at = self._at, self._now()
        return Wait(self._at.wall - at.wall, self._at.cpu - at.cpu)


async def gaps(proxy: Proxy, over: asyncio.Event) -> list[Wait]:
    """Waits between the pieces of other clients' streams, while it lasts."""
    found, watch = [], Watch(proxy)
    while not over.is_set():
        async with proxy.open(body_of(text(), stream=True)) as answer:
            watch.begin()
            async for _ in answer.content.iter_any():
                found.append(watch.end())
                if over.is_set():
                    return found
    return found


async def healths(proxy: Proxy, over: asyncio.Event) -> list[Wait]:
    """Waits for /health, ten a second."""
    found, watch = [], Watch(proxy)
    while not over.is_set():
        watch.begin()
        assert (await proxy.get("/health")).status == 200
        found.append(watch.end())
        await asyncio.sleep(0.1)
    return found


@pytest.mark.timeout(150)
async def test_forty_large_requests_at_once(tmp_path: Path) -> None:
    first = ports(3)
    urls = [f"http://127.0.0.1:{first + n}" for n in range(3)]
    async with running(str(ROOT / "benchmarks" / "upstream.py"), str(first), "3", "100", "20"):
        proxy = await Proxy.start(
            tmp_path,
            *("--encode-servers-urls", ",".join(urls[1:]), "--decode-servers-urls", urls[0]),
            *("--probe-interval", "0.5", "--probe-timeout", "20", "--pd-probe-timeout", "20"),
        )
        try:
            await proxy.answers()

            async def ready() -> bool:
                return (await proxy.get("/readyz")).status == 200

            await eventually(ready, "all ready", 30)
            base = proxy.rss
            over = asyncio.Event()
            watch = asyncio.gather(healths(proxy, over), gaps(proxy, over))
            async with running("-c", CLIENTS, str(proxy.port)) as clients:
                out, _ = await clients.communicate()
            over.set()
            for waits in await watch:
                # Where others use the machine too, a clock tells of them; the CPU it took tells of the proxy.
                busy = os.getloadavg()[0] > (os.cpu_count() or 1)
                assert percentile([w.cpu if busy else w.wall for w in waits]) < 0.5
            assert out.split() == [b"200"] * REQUESTS
            await wait_for(lambda: proxy.rss < base + 100_000_000, "memory given back", 20)
        finally:
            await proxy.stop()


def percentile(times: list[float]) -> float:
    """The 99th, of few: all but the slowest."""
    return sorted(times)[max(0, min(len(times) - 2, len(times) * 99 // 100))]

"""The stand-in's PD pulls only so many items a step: under this proxy it lives, under the guide's it dies."""

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from PIL import Image

import eccon.sim
from tests.fakes import CHAT
from tests.proxy.guide import guide_proxy
from tests.proxy.support import Proxy, body_of, eventually, free_port, text

MODEL = str(Path(eccon.sim.__file__).parent / "model")
PULLS = 4
ENV = {
    "ECCON_SIM_TIME_SCALE": "0.05",
    "ECCON_SIM_START_S": "0.1",
    "ECCON_SIM_ENCODE_MS": "20",
    "ECCON_SIM_ENCODE_MS_PER_MPIX": "0",
    "ECCON_SIM_PREFILL_MS": "200",
    "ECCON_SIM_TOKEN_MS": "20",
}


def picture(number: int) -> dict[str, Any]:
    """A small picture, another colour for each number."""
    held = io.BytesIO()
    Image.new("RGB", (32, 32), (number * 37 % 256, number * 91 % 256, number % 256)).save(held, "PNG")
    url = "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


@dataclass
class Server:
    """One stand-in process."""

    process: asyncio.subprocess.Process
    port: int
    log: Path

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def end(self) -> None:
        """End the whole tree."""
        tree = []
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            tree = [*parent.children(recursive=True), parent]
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.process.wait(), 5)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await self.process.wait()


@dataclass
class Servers:
    """A PD that pulls few items at a time, and encoders that push to it."""

    pd: Server
    encoders: list[Server] = field(default_factory=list)


async def serve(tmp: Path, name: str, **transfer: object) -> Server:
    """Start one stand-in."""
    port = free_port()
    log = tmp / f"{name}.log"
    config = {"ec_connector": "RblnECNixlConnector", **transfer}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "eccon.sim", "serve", MODEL, "--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", "m", "--ec-transfer-config", json.dumps(config)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **ENV},
        )
    return Server(process, port, log)


async def answers(server: Server) -> bool:
    """Whether its /health is 200."""
    assert server.process.returncode is None, server.log.read_text()[-2000:]
    try:
        async with aiohttp.ClientSession() as session, session.get(server.url + "/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


@contextlib.asynccontextmanager
async def cluster(tmp: Path, encoders: int = 2) -> AsyncIterator[Servers]:
    """Start a PD and its encoders; end them all."""
    pull_port = free_port()
    consumer = {"pull_host": "127.0.0.1", "pull_port": pull_port, "max_concurrent_pulls": PULLS}
    producer = {"llm_host": "127.0.0.1", "llm_pull_port": pull_port}
    servers = Servers(await serve(tmp, "pd", ec_role="ec_consumer", ec_connector_extra_config=consumer))
    try:
        for n in range(encoders):
            encoder = await serve(
                tmp, f"encoder-{n}", ec_role="ec_producer", ec_connector_extra_config=producer
            )
            servers.encoders.append(encoder)
        for server in (servers.pd, *servers.encoders):
            await eventually(lambda: answers(server), f"{server.log.name} answers", 30)  # noqa: B023
        yield servers
    finally:
        await asyncio.gather(*(server.end() for server in (servers.pd, *servers.encoders)))


REQUESTS = [[picture(request * 10 + n) for n in range(4)] for request in range(24)]


@pytest.mark.timeout(110)
async def test_under_the_proxy_the_pd_lives(tmp_path: Path) -> None:
    async with cluster(tmp_path) as servers:
        proxy = await Proxy.start(
            tmp_path,
            *("--encode-servers-urls", ",".join(server.url for server in servers.encoders)),
            *("--decode-servers-urls", servers.pd.url, "--pd-items", str(PULLS)),
            *("--probe-interval", "0.2", "--queue-timeout", "60"),
        )
        try:
            await proxy.answers()

            async def ready() -> bool:
                state = await proxy.state()
                return {one.state for one in state.encoders} | {one.state for one in state.pds} == {"ready"}

            await eventually(ready, "all ready", 20)
            replies = await asyncio.gather(
                *(proxy.chat(body_of(*parts, text(), max_tokens=64), within=100) for parts in REQUESTS)
            )
            assert {reply.status for reply in replies} == {200}, [reply.body[:300] for reply in replies][:3]
            said = [reply.json()["choices"][0]["message"]["content"] for reply in replies]
            assert len(set(said)) == len(said), "each was answered by its own pictures"
            assert servers.pd.process.returncode is None
            assert await answers(servers.pd)
        finally:
            await proxy.stop()


async def ask(session: aiohttp.ClientSession, url: str, body: bytes) -> int:
    """One request; its status, 0 when the connection broke."""
    try:
        async with session.post(
            url + CHAT, data=body, headers={"content-type": "application/json"}
        ) as answer:
            await answer.read()
            return answer.status
    except aiohttp.ClientError:
        return 0


@pytest.mark.timeout(110)
async def test_under_the_guides_proxy_the_same_load_kills_it(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as servers,
        guide_proxy([server.url for server in servers.encoders], [servers.pd.url]) as url,
        aiohttp.ClientSession() as session,
    ):
        # One request alone is served: what kills it is how many there are.
        assert await ask(session, url, body_of(*(picture(900 + n) for n in range(4)), text())) == 200
        bodies = [body_of(*parts, text(), max_tokens=64) for parts in REQUESTS]
        statuses = await asyncio.gather(*(ask(session, url, body) for body in bodies))
        assert set(statuses) != {200}
        await asyncio.wait_for(servers.pd.process.wait(), 30)

"""A proxy as a real process, clients that see exactly what it answers, and what must hold after each case."""

import asyncio
import base64
import contextlib
import io
import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import aiohttp
import msgspec
import psutil
from multidict import CIMultiDict

from eccon_proxy.schema import ProxyState, Trace
from tests.fakes import CHAT
from tests.proxy.upstreams import MODEL, PD, Encoder, Ledger

__all__ = [
    "JSON_TYPE",
    "PNG",
    "Cluster",
    "Proxy",
    "Reply",
    "body_of",
    "data_url",
    "free_port",
    "image",
    "parse_metrics",
    "text",
    "wait_for",
]

JSON_TYPE = {"content-type": "application/json"}
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def data_url(seed: int | str = 0, size: int = 0) -> str:
    """A data URL of a small PNG, different for each seed, padded by about `size` bytes of base64."""
    tail = str(seed).encode() + b"\0" * (size * 3 // 4)
    return "data:image/png;base64," + base64.b64encode(PNG + tail).decode()


def image(seed: int | str = 0, **extra: object) -> dict[str, Any]:
    """One image part."""
    return {"type": "image_url", "image_url": {"url": data_url(seed)}, **extra}


def text(words: str = "what is this?") -> dict[str, Any]:
    """One text part."""
    return {"type": "text", "text": words}


def body_of(*parts: object, **keys: object) -> bytes:
    """A chat request of one user message with these parts."""
    request = {"model": MODEL, "messages": [{"role": "user", "content": list(parts) or "hi"}], **keys}
    return json.dumps(request).encode()


def free_port() -> int:
    """A port that nobody has, below those that the kernel gives to outgoing connections and to the fakes."""
    while True:
        port = random.randrange(20000, 32768)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


async def wait_for(condition: Callable[[], object], what: str, within: float = 5.0) -> None:
    """Wait until something holds; `what` says what was missed."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        await asyncio.sleep(0.01)


async def eventually(condition: Callable[[], Awaitable[object]], what: str, within: float = 5.0) -> None:
    """`wait_for` of something that has to be asked for."""
    deadline = time.monotonic() + within
    while not await condition():
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        await asyncio.sleep(0.02)


@dataclass
class Reply:
    """What a client got. `broken` names the client's exception when the answer did not end as it should."""

    status: int
    headers: "CIMultiDict[str]"
    body: bytes
    broken: str
    seconds: float

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """The data of a stream's events."""
        lines = re.split(rb"\r\n|\n|\r", self.body)
        return [line[5:].strip().decode() for line in lines if line.startswith(b"data:")]

    def error(self, *statuses: int) -> dict[str, Any]:
        """The error object; fails unless the answer is one of these statuses in OpenAI's shape."""
        assert self.status in statuses, (self.status, self.body[:500])
        assert self.headers["content-type"].split(";")[0] == "application/json"
        value = self.json()
        assert isinstance(value, dict), value
        assert set(value) == {"error"}, value
        error: dict[str, Any] = value["error"]
        assert {"message", "type", "param", "code"} <= set(error), error
        assert isinstance(error["message"], str), error
        assert error["message"], error
        assert isinstance(error["type"], str), error
        assert error["param"] is None or isinstance(error["param"], str), error
        assert error["code"] is None or isinstance(error["code"], int | str), error
        assert "Traceback" not in error["message"]
        assert ".py" not in error["message"]
        return error


_LABELS = r"\{(?:[a-zA-Z_][a-zA-Z0-9_]*=\"(?:[^\"\\\n]|\\[\\n\"])*\",?)*\}"
SAMPLE = re.compile(rf"^([a-zA-Z_:][a-zA-Z0-9_:]*)({_LABELS})? (\S+)( \d+)?$")


def parse_metrics(exposition: str) -> dict[str, float]:
    """Samples by name and labels; fails on anything that Prometheus would refuse."""
    samples: dict[str, float] = {}
    types: dict[str, str] = {}
    assert exposition.endswith("\n")
    for line in exposition.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind in {"counter", "gauge", "histogram", "summary", "untyped"}, line
            assert name not in types, f"second TYPE: {line}"
            types[name] = kind
        elif line.startswith("#") or not line:
            assert not line or line.startswith("# HELP ") or not line.startswith("# HELP"), line
        else:
            match = SAMPLE.match(line)
            assert match, f"not a sample: {line!r}"
            family = re.sub(r"_(bucket|sum|count)$", "", match[1])
            assert match[1] in types or types.get(family) in {"histogram", "summary"}, f"no TYPE: {line}"
            key = match[1] + (match[2] or "")
            assert key not in samples, f"twice: {key}"
            samples[key] = float(match[3])
    return samples


@dataclass(eq=False)
class Proxy:
    """`python -m eccon_proxy` as a process of its own."""

    port: int
    admin_socket: Path
    log_path: Path
    process: asyncio.subprocess.Process
    started: ClassVar[list["Proxy"]] = []
    """All of this run: a case that fails half-way leaves its own to the end."""

    @classmethod
    async def start(
        cls,
        tmp: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        port: int | None = None,
        admin: bool = True,
        under: Sequence[str] = (),
    ) -> "Proxy":
        """Start it; it may not answer yet. `flags` come without host and port, and admin unless it is off.

        `under` is a command that runs it, as a shell that sets limits first.
        """
        port = port or free_port()
        # Short: a socket's path holds 107 bytes.
        socket_path, log_path = tmp / f"a{port}.sock", tmp / f"proxy-{port}.log"
        argv = ["--host", "127.0.0.1", "--port", str(port), *flags]
        if admin:
            argv += ["--admin", f"unix:{socket_path}"]
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(*under, sys.executable),
                *("-m", "eccon_proxy", *argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                cwd=tmp,
            )
        proxy = cls(port, socket_path, log_path, process)
        cls.started.append(proxy)
        return proxy

    @property
    def url(self) -> str:
        """Its public address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """All that it has written."""
        return self.log_path.read_text(errors="replace")

    @property
    def fds(self) -> int:
        """Open file descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208  names suffice

    @property
    def rss(self) -> int:
        """Resident bytes."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        within: float = 30.0,
    ) -> Reply:
        """One request on a connection of its own; an answer that breaks off is returned as it came."""
        at = time.monotonic()
        async with (
            _session() as session,
            session.request(
                method,
                self.url + path,
                # A file is read by threads, which a crowd waits for; bytes in number make aiohttp warn.
                data=io.BytesIO(body) if body and len(body) > 2**19 else body,
                headers=headers if headers is not None else JSON_TYPE if body is not None else {},
                timeout=aiohttp.ClientTimeout(total=within),
                allow_redirects=False,
            ) as answer,
        ):
            received, broken = bytearray(), ""
            try:
                async for data in answer.content.iter_any():
                    received += data
            except aiohttp.ClientError as error:
                broken = repr(error)
            return Reply(
                answer.status,
                CIMultiDict(answer.headers),
                bytes(received),
                broken,
                time.monotonic() - at,
            )

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        """GET a path."""
        return await self.request("GET", path, None, headers)

    async def chat(self, body: bytes, headers: dict[str, str] | None = None, within: float = 30.0) -> Reply:
        """POST a chat request."""
        return await self.request("POST", CHAT, body, {**JSON_TYPE, **(headers or {})}, within)

    @contextlib.asynccontextmanager
    async def open(
        self, body: bytes, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """POST a chat request and read the answer yourself; leaving closes the connection."""
        async with (
            _session() as session,
            session.post(self.url + CHAT, data=body, headers={**JSON_TYPE, **(headers or {})}) as answer,
        ):
            yield answer

    async def raw(self, data: bytes, within: float = 10.0, *, eof: bool = False) -> bytes:
        """Send bytes as they are and read until the proxy closes, or until it has been silent for long."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            if eof:
                writer.write_eof()
            received = bytearray()
            with contextlib.suppress(ConnectionError, TimeoutError, asyncio.TimeoutError):
                while piece := await asyncio.wait_for(reader.read(65536), within):
                    received += piece
            return bytes(received)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def admin(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """One request to the admin listener."""
        at = time.monotonic()
        connector = aiohttp.UnixConnector(str(self.admin_socket), force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.request(
                method,
                f"http://admin{path}",
                data=None if body is None else json.dumps(body).encode(),
                headers={**(JSON_TYPE if body is not None else {}), **(headers or {})},
                timeout=aiohttp.ClientTimeout(total=30),
            ) as answer,
        ):
            data = await answer.read()
            return Reply(answer.status, CIMultiDict(answer.headers), data, "", time.monotonic() - at)

    async def state(self) -> ProxyState:
        """What the admin listener says of it."""
        return msgspec.json.decode((await self.admin("GET", "/admin/state")).body, type=ProxyState)

    async def traces(self, limit: int = 100) -> list[Trace]:
        """The last traces, newest first."""
        answer = await self.admin("GET", f"/admin/traces?limit={limit}")
        return msgspec.json.decode(answer.body, type=dict[str, list[Trace]])["traces"]

    async def trace(self, request_id: str) -> Trace:
        """One trace."""
        answer = await self.admin("GET", f"/admin/traces/{quote(request_id)}")
        assert answer.status == 200, answer.body
        return msgspec.json.decode(answer.body, type=Trace)

    async def metrics(self) -> dict[str, float]:
        """Its Prometheus samples."""
        answer = await self.get("/metrics")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/plain")
        return parse_metrics(answer.body.decode())

    async def answers(self, within: float = 60.0) -> None:
        """Wait until both listeners answer."""

        async def alive() -> bool:
            assert self.process.returncode is None, self.log
            try:
                return (await self.get("/livez")).status == 200 and bool(await self.state())
            except (aiohttp.ClientError, OSError):
                return False

        await eventually(alive, "the proxy answers", within)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it lives."""
        if self.process.returncode is None:
            self.process.send_signal(number)

    async def exited(self, within: float = 10.0) -> int:
        """Wait for its end; the exit code."""
        return await asyncio.wait_for(self.process.wait(), within)

    async def stop(self) -> None:
        """End it, by force: what it does on SIGTERM has cases of its own."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        read_bufsize=2**20,
        max_line_size=2**18,
        max_field_size=2**18,
    )


@dataclass(eq=False)
class Cluster:
    """One proxy before fakes."""

    proxy: Proxy
    encoders: list[Encoder]
    pds: list[PD]
    ledger: Ledger
    base_fds: int = 0
    log_at: int = 0
    lenient: set[str] = field(default_factory=set)
    """Checks that the running case does not want at its end: `ledger`, `traceback`."""

    @property
    def pd(self) -> PD:
        """The first, mostly the only PD."""
        return self.pds[0]

    @property
    def fakes(self) -> list[Encoder | PD]:
        """All upstreams."""
        return [*self.encoders, *self.pds]

    @property
    def encodes(self) -> int:
        """Encoder requests seen by all encoders."""
        return sum(len(encoder.encodes) for encoder in self.encoders)

    @property
    def own_fds(self) -> int:
        """The proxy's descriptors without the connections that it keeps to the fakes."""
        return self.proxy.fds - sum(len(fake.connections) for fake in self.fakes)

    async def ready(self, within: float = 60.0) -> None:
        """Wait until every encoder and PD is in use; one that is ejected returns by a request's trial."""

        async def settled() -> bool:
            state = await self.proxy.state()
            states = {e.state for e in state.encoders} | {pd.state for pd in state.pds}
            if "ejected" in states and states <= {"ejected", "ready"}:
                await asyncio.gather(*(self.proxy.chat(body_of(image("trial"))) for _ in self.encoders))
            return states == {"ready"}

        await eventually(settled, "all upstreams ready", within)

    async def idle(self, within: float = 5.0) -> None:
        """Wait until nothing is in flight."""

        async def quiet() -> bool:
            state = await self.proxy.state()
            return not (state.inflight or state.queued or any(e.inflight for e in state.encoders))

        await eventually(quiet, "nothing in flight", within)

    async def begin(self) -> None:
        """Forget the case before."""
        for fake in self.fakes:
            fake.reset()
            fake.drop(busy=True)
            if not fake.listening:
                await fake.start()
        await self.ready(5.0)
        for fake in self.fakes:
            fake.seen.clear()
        self.ledger.clear()
        self.lenient.clear()
        self.log_at = len(self.proxy.log)

    async def check(self) -> None:
        """What must hold at the end of every case."""
        for fake in self.fakes:
            assert not fake.errors, fake.errors
        assert "ledger" in self.lenient or not self.ledger.violations, self.ledger.violations
        assert "traceback" in self.lenient or "Traceback" not in self.proxy.log[self.log_at :], self.proxy.log
        if self.proxy.process.returncode is None:
            await self.idle()
            await self._gauges_are_zero()
            await wait_for(
                lambda: self.own_fds <= self.base_fds,
                f"descriptors back to {self.base_fds}",
            )

    async def _gauges_are_zero(self) -> None:
        seen: dict[str, float] = {}

        async def zero() -> bool:
            seen.clear()
            samples = await self.proxy.metrics()
            seen.update({k: v for k, v in samples.items() if k.startswith("eccon_proxy_inflight_")})
            return bool(seen) and not any(seen.values())

        await eventually(zero, f"gauges at 0: {seen}")

    async def end(self) -> None:
        """Stop everything."""
        await self.proxy.stop()
        for fake in self.fakes:
            await fake.stop()


QUICK = (
    # Intervals for quick tests, time limits that a busy machine does not pass by chance.
    *("--probe-interval", "0.1", "--probe-timeout", "3", "--probe-failures", "2"),
    *("--pd-probe-interval", "0.1", "--pd-probe-timeout", "3"),
    *("--eject-seconds", "0.3"),
)


async def start_cluster(
    tmp: Path,
    flags: Sequence[str],
    *,
    encoders: int = 2,
    pds: int = 1,
    up: bool = True,
    env: dict[str, str] | None = None,
    quick: bool = True,
    under: Sequence[str] = (),
) -> Cluster:
    """Start fakes and a proxy before them; `quick` with probes fast enough for tests, else as shipped."""
    ledger = Ledger()
    the_pds = [PD(f"pd-{i}", ledger) for i in range(pds)]
    fakes = [Encoder(f"encoder-{i}", ledger, the_pds[i % pds]) for i in range(encoders)]
    for fake in (*fakes, *the_pds):
        await fake.start()
    groups = [
        f"--group={pd.url}=" + ",".join(e.url for e in fakes if e.pd is pd) for pd in the_pds if pds > 1
    ]
    proxy = await Proxy.start(
        tmp,
        *("--encode-servers-urls", ",".join(e.url for e in fakes)),
        *("--decode-servers-urls", ",".join(p.url for p in the_pds)),
        *groups,
        *(QUICK if quick else ()),
        *flags,
        env=env,
        under=under,
    )
    cluster = Cluster(proxy, fakes, the_pds, ledger)
    try:
        await proxy.answers()
        if up:
            await cluster.ready()
            await cluster.idle()
        cluster.base_fds = cluster.own_fds
    except BaseException:
        await cluster.end()
        raise
    return cluster

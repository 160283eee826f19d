"""The admin API of a proxy that runs alone, as a source: watch, drain, resume, remove, send a prompt."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import quote

import msgspec

from eccon.client import Address, Call, ControlError, NotRunning
from eccon.console.proxyview import ProxyView
from eccon.console.source import OF_RECORDINGS, Problem, Sink
from eccon_proxy.schema import EncoderInfo, PDInfo, ProxyState, Trace

__all__ = ["ProxySource"]

AGAIN_S = 1.0
COUNTS_EVERY_S = 2.0
SILENCE_S = 40.0
"""The proxy says something every 15 s."""
ANSWER_S = 10.0
TRACES = 200
PROCESS_CONTROL = ("restart", "add", "stop", "start", "kill", "up", "down", "roll", "restart_pd", "scale")
OF_DAEMONS = frozenset((*PROCESS_CONTROL, "reload", "doctor", "diagnostics", "logs"))
"""Actions on processes and their files."""


class _Traces(msgspec.Struct):
    traces: tuple[Trace, ...]


class ProxySource:
    """One proxy behind its admin address; `key` where it wants one."""

    flag = "proxy alone"
    lacks = OF_RECORDINGS | OF_DAEMONS

    def __init__(self, address: Address, key: str = "") -> None:
        self.address = address
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._name = str(address) if not isinstance(address, tuple) else f"{address[0]}:{address[1]}"
        self._public: Address | None = None

    def now(self) -> float:
        """The present."""
        return time.time()

    async def probe(self) -> None:
        """Asks once. Raises Problem when it does not answer as a proxy."""
        try:
            msgspec.json.decode(await self._get("/admin/state"), type=ProxyState)
        except (NotRunning, ControlError, msgspec.MsgspecError) as e:
            msg = f"no proxy's admin API answers on {self._name}: {e}"
            raise Problem(msg) from e

    async def watch(self, sink: Sink) -> None:
        """Feeds `sink` for ever, over restarts of the proxy."""
        while True:
            try:
                await self._follow(sink)
                reason = "it closed the connection"
            except (NotRunning, ControlError, OSError, msgspec.MsgspecError) as e:
                reason = str(e) or type(e).__name__
            sink.connection(f"proxy lost: {reason}")
            await asyncio.sleep(AGAIN_S)

    async def _follow(self, sink: Sink) -> None:
        settings = msgspec.json.decode(await self._get("/admin/settings"), type=dict[str, Any])
        host, port = str(settings.get("host", "")), int(settings.get("port", 0))
        if host in ("", "0.0.0.0", "::"):
            host = self.address[0] if isinstance(self.address, tuple) else "127.0.0.1"
        self._public = (host, port)
        scheme = "https" if settings.get("ssl_certfile") else "http"
        view = ProxyView(self._name, f"{scheme}://{host}:{port}")
        counting = asyncio.ensure_future(self._count(view, sink))
        try:
            async with Call(self.address, "GET", "/admin/events", {}, headers=self._headers) as call:
                await call.expect_success()
                event = b""
                async for line in call.lines(SILENCE_S):
                    if line.startswith(b"event: "):
                        event = line[7:]
                    elif line.startswith(b"data: "):
                        if event == b"shutdown":
                            return
                        await self._take(view, event, line[6:])
                        sink.connection("")
                        sink.take(view.state())
        finally:
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)

    async def _take(self, view: ProxyView, event: bytes, data: bytes) -> None:
        if event == b"state":
            traces = msgspec.json.decode(await self._get(f"/admin/traces?limit={TRACES}"), type=_Traces)
            for trace in reversed(traces.traces):
                view.take_trace(trace)
            view.take_state(msgspec.json.decode(data, type=ProxyState))
        elif event == b"encoder":
            view.take_encoder(msgspec.json.decode(data, type=EncoderInfo))
        elif event == b"pd":
            view.take_pd(msgspec.json.decode(data, type=PDInfo))
        elif event == b"trace":
            view.take_trace(msgspec.json.decode(data, type=Trace))

    async def _count(self, view: ProxyView, sink: Sink) -> None:
        """Counts are not among the events: they are asked for."""
        while True:
            await asyncio.sleep(COUNTS_EVERY_S)
            try:
                view.take_state(msgspec.json.decode(await self._get("/admin/state"), type=ProxyState))
            except (NotRunning, ControlError, msgspec.MsgspecError):
                continue  # the event stream says that it is lost
            sink.take(view.state())

    async def _get(self, path: str) -> bytes:
        return await self._whole("GET", path)

    async def _whole(self, method: str, path: str) -> bytes:
        async with Call(self.address, method, path, {}, headers=self._headers) as call:
            await call.expect_success()
            return b"".join([chunk async for chunk in call.body(ANSWER_S)])

    async def do(self, action: str, name: str = "") -> str:
        """Drains, resumes, removes a member; processes are not the proxy's."""
        path = f"/admin/encoders/{quote(name, safe='')}"
        calls = {
            "drain": ("POST", f"{path}/drain", f"{name} drains"),
            "resume": ("POST", f"{path}/resume", f"{name} gets items again"),
            "remove": ("DELETE", path, f"{name} leaves the proxy, when its work is done"),
        }
        if action not in calls:
            msg = "a proxy alone starts and stops no processes"
            raise Problem(msg)
        method, target, done = calls[action]
        try:
            await self._whole(method, target)
        except (ControlError, NotRunning) as e:
            raise Problem(str(e)) from e
        return done

    async def read_log(
        self,
        name: str,
        lines: int,  # noqa: ARG002  the signature of sources
        take: Callable[[list[str]], None],  # noqa: ARG002
        grep: str = "",  # noqa: ARG002
    ) -> str:
        """Who runs alone keeps no logs for others."""
        return f"a proxy alone knows no logs, so none of {name}"

    async def prompt(self, body: bytes, request_id: str) -> AsyncIterator[bytes]:
        """The answer of its public port, as it comes."""
        if self._public is None:
            msg = "the proxy has not answered yet"
            raise Problem(msg)
        headers = {"content-type": "application/json", "x-request-id": request_id}
        try:
            async with Call(self._public, "POST", "/v1/chat/completions", {}, body, headers, None) as call:
                await call.expect_success()
                async for chunk in call.body(None):
                    yield chunk
        except (ControlError, NotRunning, ValueError) as e:
            raise Problem(str(e)) from e

"""The daemon as a client of the proxy's admin API: follows its events, keeps its members, gives it orders.

A proxy that starts anew knows the encoders of its command line only: at every contact the members are
compared with those that should be there, and put right.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from eccon.model import Trace
from eccon_proxy.schema import EncoderInfo, PDInfo, ProxyState

__all__ = ["ProxyLink", "ProxyLinkError"]

RETRY_S = 0.3
SILENCE_S = 40.0
"""The proxy sends a comment every 15 s: a longer silence means that it hangs."""
REQUEST_TIMEOUT_S = 10.0
TRACES_AT_START = 200


class ProxyLinkError(Exception):
    """The proxy refused, or cannot be reached."""


class _Traces(msgspec.Struct):
    traces: tuple[Trace, ...]


class ProxyLink:
    """See the module. `run` is its task; the rest may be called when `connected`."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.connected = False
        self.encoders: dict[str, EncoderInfo] = {}
        self.pds: dict[str, PDInfo] = {}
        self.draining = False
        self.settings: dict[str, Any] = {}
        """The proxy's own, wherever they came from; known since the last contact."""
        self.members: Callable[[], Mapping[str, str]] = dict
        """URL by id of the encoders that should be members now."""
        self.known: Callable[[str], bool] = lambda _: True
        """Whether an id is in the topology at all; a member that is not is put out."""
        self.aside: Callable[[str], bool] = lambda _: False
        """Whether a member is kept without items by an operator."""
        self.on_trace: Callable[[Trace], None] = lambda _: None
        self.on_contact: Callable[[ProxyState, set[str]], None] = lambda _state, _ids: None
        """A new contact: the proxy's state, and the ids of the requests that it knows."""
        self.on_change: Callable[[], None] = lambda: None
        """Members, PDs, or the contact itself changed."""
        self._session: aiohttp.ClientSession | None = None
        self._last_id = ""
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Follows the proxy for as long as the task lives, over its restarts."""
        connector = aiohttp.UnixConnector(str(self.socket), limit=0, keepalive_timeout=3)
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession("http://proxy", connector=connector, timeout=timeout) as session:
            self._session = session
            while True:
                with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError, ProxyLinkError):
                    await self._follow(session)
                if self.connected:
                    self.connected = False
                    self.on_change()
                await asyncio.sleep(RETRY_S)

    async def _follow(self, session: aiohttp.ClientSession) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2, sock_read=SILENCE_S)
        # No Last-Event-ID: a proxy that was restarted counts from the beginning, and the state comes first.
        async with session.get("/admin/events", timeout=timeout) as response:
            if response.status != 200:
                return
            async for event, data in _events(response.content):
                if event == "shutdown":
                    # It waits for its connections to end.
                    return
                await self._take(event, data)

    async def _take(self, event: str, data: bytes) -> None:
        try:
            if event == "state":
                await self._take_state(msgspec.json.decode(data, type=ProxyState))
            elif event == "encoder":
                info = msgspec.json.decode(data, type=EncoderInfo)
                self.encoders[info.id] = info
                self.on_change()
            elif event == "pd":
                pd = msgspec.json.decode(data, type=PDInfo)
                self.pds[pd.url] = pd
                self.on_change()
            elif event == "trace":
                self.on_trace(msgspec.json.decode(data, type=Trace))
        except msgspec.DecodeError as e:
            msg = f"the proxy says what is not understood: {e}"
            raise ProxyLinkError(msg) from e

    async def _take_state(self, state: ProxyState) -> None:
        first = not self.connected
        self.encoders = {e.id: e for e in state.encoders}
        self.pds = {p.url: p for p in state.pds}
        self.draining = state.draining
        self.connected = True
        if first:
            self.settings = msgspec.json.decode(
                await self._call("GET", "/admin/settings"), type=dict[str, Any]
            )
            traces = msgspec.json.decode(
                await self._call("GET", f"/admin/traces?limit={TRACES_AT_START}"), type=_Traces
            )
            for trace in reversed(traces.traces):
                self.on_trace(trace)
            self.on_contact(state, {t.id for t in traces.traces})
            await self.reconcile()
        self.on_change()

    async def reconcile(self) -> None:
        """Members as they should be: missing ones join, drained ones resume, strangers leave."""
        if not self.connected:
            return
        async with self._lock:
            wanted = dict(self.members())
            for info in list(self.encoders.values()):
                url = wanted.get(info.id)
                if (url is not None and not _same_url(info.url, url)) or not self.known(info.id):
                    await self._quietly("DELETE", f"/admin/encoders/{quote(info.id)}?now=true&force=true")
                    self.encoders.pop(info.id, None)
                elif url is not None and not self.aside(info.id) and info.state in {"draining", "drained"}:
                    await self._quietly("POST", f"/admin/encoders/{quote(info.id)}/resume")
            for name, url in wanted.items():
                if name not in self.encoders:
                    await self._quietly("POST", "/admin/encoders", {"url": url, "id": name})
                known = self.encoders.get(name)
                if self.aside(name) and known and known.state not in {"draining", "drained"}:
                    await self._quietly("POST", f"/admin/encoders/{quote(name)}/drain")

    async def state(self) -> ProxyState:
        """The proxy's figures of this moment. Raises as `drain`."""
        return msgspec.json.decode(await self._call("GET", "/admin/state"), type=ProxyState)

    def setting(self, name: str) -> float:
        """A number among its settings; 0 when it does not say."""
        value = self.settings.get(name)
        return float(value) if isinstance(value, (int, float)) else 0.0

    async def drain(self, name: str, *, now: bool = False) -> None:
        """No new items for an encoder; with `now` what is in flight is cancelled and goes elsewhere.

        Raises:
            ProxyLinkError: refused, or no contact.
        """
        self._take_info(
            await self._call("POST", f"/admin/encoders/{quote(name)}/drain" + ("?now=true" if now else ""))
        )

    async def resume(self, name: str) -> None:
        """Items again for an encoder that was drained. Raises as `drain`."""
        self._take_info(await self._call("POST", f"/admin/encoders/{quote(name)}/resume"))

    async def expect_pd_restart(self, url: str, within_s: float) -> None:
        """The PD will be ended on purpose: the requests at it then are not to blame. Raises as `drain`."""
        await self._call("POST", "/admin/pds/expect-restart", {"url": url, "seconds": within_s})

    async def leave(self, name: str) -> None:
        """An encoder is no member any more. Raises as `drain`."""
        await self._call("DELETE", f"/admin/encoders/{quote(name)}?now=true&force=true")
        self.encoders.pop(name, None)
        self.on_change()

    def _take_info(self, data: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            info = msgspec.json.decode(data, type=EncoderInfo)
            self.encoders[info.id] = info

    async def _quietly(self, method: str, path: str, body: Any = None) -> None:
        with contextlib.suppress(ProxyLinkError):
            self._take_info(await self._call(method, path, body))

    async def _call(self, method: str, path: str, body: Any = None) -> bytes:
        if self._session is None or not self.connected:
            msg = "no contact with the proxy"
            raise ProxyLinkError(msg)
        try:
            async with self._session.request(method, path, json=body) as response:
                data = await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as e:
            msg = f"{method} {path}: {str(e) or type(e).__name__}"
            raise ProxyLinkError(msg) from e
        if response.status >= 400:
            msg = f"{method} {path}: {response.status}: {data[:200].decode(errors='replace')}"
            raise ProxyLinkError(msg)
        return data


def _same_url(one: str, other: str) -> bool:
    return one.rstrip("/") == other.rstrip("/")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[str, bytes]]:
    """Server-sent events: name and data."""
    rest, event, data = b"", "message", b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for raw in lines:
            line = raw.rstrip(b"\r")
            if not line:
                if data:
                    yield event, data
                event, data = "message", b""
            elif line.startswith(b"event:"):
                event = line[6:].strip().decode()
            elif line.startswith(b"data:"):
                data += (b"\n" if data else b"") + line[5:].lstrip(b" ")

"""The control API: HTTP with JSON on the daemon's unix socket, described by OpenAPI at /schema.

Commands return when they are accepted; with `?wait=SECONDS`, when their end state is reached or time is up.
"""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import msgspec
from litestar import Litestar, Request, Response, delete, get, post
from litestar.datastructures import State as AppState
from litestar.exceptions import HTTPException
from litestar.openapi import OpenAPIConfig
from litestar.params import Parameter
from litestar.response import Stream
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from eccon import __version__
from eccon.model import ClusterState, Trace
from eccon.supervisor import logs
from eccon.supervisor.cluster import Cluster, RefusedError
from eccon.supervisor.diagnostics import bundle
from eccon.supervisor.owner import Owner
from eccon.supervisor.relay import prompt
from eccon.supervisor.shape import Shape

__all__ = ["API_VERSION", "Consoles", "PeerChecked", "build"]

API_VERSION = 1
PING_EVERY_S = 15.0
LINES_MAX = 100_000
Wait = Annotated[float, Parameter(ge=0, le=3600, description="Seconds to wait for the end state.")]


class Version(msgspec.Struct, frozen=True):
    """Who answers."""

    api: int
    version: str
    pid: int


class Accepted(msgspec.Struct, frozen=True):
    """A command was taken. `state` is that of the process, or of the cluster."""

    name: str
    state: str
    settled: bool
    """Whether the end state is reached."""


class Traces(msgspec.Struct, frozen=True):
    """Requests, newest first."""

    traces: tuple[Trace, ...]


class Consoles:
    """Counts the event streams that are consoles."""

    def __init__(self) -> None:
        self.attached = 0
        self.changed = asyncio.Event()

    def add(self, n: int) -> None:
        """One more or one less."""
        self.attached += n
        self.changed.set()


class PeerChecked(HttpToolsProtocol):
    """Serves only this user and root: the socket's mode says so, its peer's uid proves it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Drops a stranger before a byte is read."""
        peer = transport.get_extra_info("socket")
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if not may_connect(struct.unpack("3i", raw)[1]):
            transport.abort()
            return
        super().connection_made(transport)


def may_connect(uid: int) -> bool:
    """Whether a process of that user may give orders."""
    return uid in {0, os.geteuid()}


def build(cluster: Cluster, consoles: Consoles, shut_down: Callable[[], None]) -> Litestar:
    """The application. `shut_down` begins the daemon's end, once everything is stopped."""
    board = cluster.board
    shape = Shape(cluster)

    async def settle(owner: Owner, wait: float) -> Accepted:
        def done() -> bool:
            return cluster.owners.get(owner.name) is not owner or owner.settled

        settled = await board.until(done, wait) if wait else done()
        gone = cluster.owners.get(owner.name) is not owner
        return Accepted(owner.name, "removed" if gone else owner.state.value, settled)

    @get("/v1/version", sync_to_thread=False)
    def version() -> Version:
        return Version(API_VERSION, __version__, os.getpid())

    @get("/v1/state", sync_to_thread=False)
    def state() -> ClusterState:
        return board.snapshot()

    @get("/v1/events")
    async def events(after: int | None = None, console: bool = False) -> Stream:
        return Stream(_events(cluster, consoles, after, console), media_type="text/event-stream")

    @post("/v1/up", status_code=200)
    async def up(partial: bool = False, wait: Wait = 0) -> Accepted:
        if not any(o.life for o in cluster.owners.values()):
            shape.reload()
        await cluster.up(partial=partial)
        settled = await board.until(lambda: all(o.settled for o in cluster.owners.values()), wait)
        return Accepted("cluster", board.cluster.health, settled)

    @post("/v1/down", status_code=200)
    async def down(wait: Wait = 0) -> Accepted:
        task = cluster.down()
        await asyncio.wait({task}, timeout=wait)
        return Accepted("cluster", board.cluster.health, task.done())

    @post("/v1/shutdown", status_code=202, sync_to_thread=False)
    def shutdown() -> Accepted:
        shut_down()
        return Accepted("cluster", board.cluster.health, settled=False)

    @post("/v1/reload", status_code=200, sync_to_thread=False)
    def reload() -> Accepted:
        shape.reload()
        return Accepted("cluster", board.cluster.health, settled=True)

    @post("/v1/processes/{name:str}/start", status_code=200)
    async def start(name: str, wait: Wait = 0) -> Accepted:
        return await settle(cluster.begin(name), wait)

    @post("/v1/processes/{name:str}/stop", status_code=200)
    async def stop(name: str, force: bool = False, wait: Wait = 0) -> Accepted:
        return await settle(cluster.stop(name, force=force), wait)

    @post("/v1/processes/{name:str}/restart", status_code=200)
    async def restart(name: str, force: bool = False, wait: Wait = 0) -> Accepted:
        return await settle(cluster.restart(name, force=force), wait)

    @post("/v1/encoders", status_code=201)
    async def add(wait: Wait = 0) -> Accepted:
        return await settle(await shape.add(), wait)

    @post("/v1/encoders/restart", status_code=200)
    async def roll(wait: Wait = 0) -> Accepted:
        task = shape.roll()
        await asyncio.wait({task}, timeout=wait)
        return Accepted("encoders", board.cluster.health, task.done())

    @post("/v1/encoders/scale", status_code=200)
    async def scale(count: Annotated[int, Parameter(ge=1, le=1024)], wait: Wait = 0) -> Accepted:
        await shape.scale(count)
        owners = cluster.owners

        def done() -> bool:
            return len(owners) == count + 2 and all(o.settled for o in owners.values())

        return Accepted("encoders", board.cluster.health, await board.until(done, wait))

    @post("/v1/encoders/{name:str}/drain", status_code=200)
    async def drain(name: str, now: bool = False, wait: Wait = 0) -> Accepted:
        """No items for it until `resume`; with `now`, those in flight go elsewhere at once."""
        owner = await cluster.set_aside(name, now=now)
        drained = await board.until(lambda: cluster.rotation.is_drained(name), wait)
        return Accepted(owner.name, owner.state.value, drained)

    @post("/v1/encoders/{name:str}/resume", status_code=200)
    async def resume(name: str, wait: Wait = 0) -> Accepted:
        owner = await cluster.resume(name)
        return Accepted(owner.name, owner.state.value, await board.until(lambda: cluster.serves(name), wait))

    @get("/v1/traces", sync_to_thread=False)
    def traces(limit: Annotated[int, Parameter(ge=1)] = 50) -> Traces:
        return Traces(tuple(reversed(board.snapshot().traces[-limit:])))

    @get("/v1/traces/{trace_id:str}", sync_to_thread=False)
    def trace(trace_id: str) -> Trace:
        found = board.trace_of(trace_id)
        if found is None:
            msg = f"no request is known as {trace_id!r}"
            raise RefusedError(msg, 404)
        return found

    @delete("/v1/encoders/{name:str}", status_code=200)
    async def remove(name: str, force: bool = False, wait: Wait = 0) -> Accepted:
        return await settle(shape.remove(name, force=force), wait)

    @get("/v1/logs/{name:str}")
    async def read_logs(
        name: str,
        lines: Annotated[int, Parameter(ge=0, le=LINES_MAX)] = 200,
        follow: bool = False,
        grep: str = "",
    ) -> Response[Any] | Stream:
        if name != logs.DAEMON and cluster.owner(name).spec.external:
            msg = f"{name} is external: its log is where it was started"
            raise RefusedError(msg)
        if follow:
            stream = logs.follow(cluster.paths, name, lines, grep)
            return Stream(stream, media_type="text/plain; charset=utf-8")
        found = await asyncio.to_thread(logs.last_lines, cluster.paths, name, lines, grep)
        text = "".join(line + "\n" for line in found)
        return Response(text.encode(errors="replace"), media_type="text/plain; charset=utf-8")

    @get("/v1/diagnostics")
    async def diagnostics() -> Response[bytes]:
        """A tar.gz for a report, secrets masked."""
        specs = [o.spec for o in cluster.owners.values()]
        data = await asyncio.to_thread(bundle, cluster.paths, cluster.topology.path, board.snapshot(), specs)
        return Response(data, media_type="application/gzip")

    return Litestar(
        [
            *(version, state, events, traces, trace, read_logs, prompt, diagnostics),
            *(up, down, shutdown, reload, start, stop, restart, add, remove, roll, scale, drain, resume),
        ],
        exception_handlers={RefusedError: _refused, HTTPException: _http_error},
        openapi_config=OpenAPIConfig(title="eccon control API", version=str(API_VERSION), path="/schema"),
        request_max_body_size=None,
        state=AppState({"cluster": cluster}),
        logging_config=None,
    )


async def _events(
    cluster: Cluster, consoles: Consoles, after: int | None, console: bool
) -> AsyncIterator[bytes]:
    consoles.add(console)
    stream = cluster.board.subscribe(after)
    waiting: asyncio.Task[Any] | None = None
    try:
        while True:
            if waiting is None:
                waiting = asyncio.ensure_future(anext(stream))
            done, _ = await asyncio.wait({waiting}, timeout=PING_EVERY_S)
            if not done:
                yield b": ping\n\n"
                continue
            try:
                seq, name, data = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield b"id: %d\nevent: %s\ndata: %s\n\n" % (seq, name.encode(), data)
    finally:
        consoles.add(-console)
        if waiting is not None:
            waiting.cancel()
            await asyncio.wait({waiting})
        await stream.aclose()


def _error(message: str, status: int) -> Response[Any]:
    return Response({"error": {"message": message}}, status_code=status)


def _refused(_: Request[Any, Any, Any], error: RefusedError) -> Response[Any]:
    return _error(str(error), error.status)


def _http_error(_: Request[Any, Any, Any], error: HTTPException) -> Response[Any]:
    extra = f": {error.extra}" if error.extra else ""
    return _error(f"{error.detail}{extra}", error.status_code)

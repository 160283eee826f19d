"""The API server's end of the engine: sends requests, sorts outputs to who waits, notices its death."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable

import msgspec

from eccon.sim.errors import ApiError, LostError, dead
from eccon.sim.ipc import (
    LENGTH,
    Abort,
    Add,
    Dead,
    FromEngine,
    Output,
    Ready,
    Refused,
    Stats,
    Step,
    ToEngine,
    frame,
)

__all__ = ["EngineClient"]


class EngineClient:
    """`errored` is for good: from then on every request is refused and `/health` says 503."""

    def __init__(self, end: socket.socket, pid: int) -> None:
        self.pid = pid
        self.errored = False
        self.stats = Stats()
        self.on_step: Callable[[list[Output]], None] = lambda _: None
        self.on_death: Callable[[], None] = lambda: None
        self._socket = end
        self._queues: dict[str, asyncio.Queue[Output | ApiError]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._reaped: int | None = None

    def wait_ready(self) -> bool:
        """Block until the engine has loaded; False when it died of it."""
        head = self._socket.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(head) < LENGTH.size:
            return False
        body = self._socket.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL)
        return isinstance(msgspec.msgpack.decode(body, type=FromEngine), Ready)

    async def start(self) -> None:
        """Begin to listen, on the running event loop."""
        self._socket.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._task = asyncio.create_task(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                length = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
                message = msgspec.msgpack.decode(await reader.readexactly(length), type=FromEngine)
                if isinstance(message, Dead):
                    break
                if isinstance(message, Step):
                    self.stats = message.stats
                    self.on_step(message.outputs)
                    for output in message.outputs:
                        self._give(output.id, output)
                elif isinstance(message, Refused):
                    error = LostError if message.silent else ApiError
                    self._give(
                        message.id, error("Internal server error", status=500, type_="InternalServerError")
                    )
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it died without a word
        self.errored = True
        for waiting in list(self._queues):
            self._give(waiting, dead())
        self.on_death()

    def _give(self, request_id: str, what: Output | ApiError) -> None:
        waiting = self._queues.get(request_id)
        if waiting is not None:
            waiting.put_nowait(what)

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def generate(self, request: Add) -> AsyncGenerator[Output, None]:
        """Everything that comes of a request, until all its choices have ended. Left early, it is aborted.

        Raises:
            ApiError: the engine is or gets dead, or refuses this request.
        """
        if self.errored:
            raise dead()
        waiting: asyncio.Queue[Output | ApiError] = asyncio.Queue()
        self._queues[request.id] = waiting
        left = request.n
        self._send(request)
        try:
            while left:
                found = await waiting.get()
                if isinstance(found, ApiError):
                    left = 0
                    raise found
                left -= found.finish_reason is not None
                yield found
        finally:
            del self._queues[request.id]
            if left:
                self._send(Abort(request.id))

    def reap(self) -> int | None:
        """The engine's exit code, or minus its signal; None while it lives."""
        if self._reaped is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._reaped = os.waitstatus_to_exitcode(status)
        return self._reaped

    def stop(self, grace_s: float) -> bool:
        """SIGTERM, and SIGKILL after `grace_s`. Blocks. False when it took SIGKILL."""
        if self.reap() is not None:
            return True
        os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.reap() is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                while self.reap() is None:
                    time.sleep(0.005)
                return False
            time.sleep(0.005)
        return True

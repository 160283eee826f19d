"""A small control server on a real unix socket: one state, changes on demand, requests written down."""

import asyncio
import contextlib
import re
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path

import msgspec

from eccon.model import Change, ClusterState

__all__ = ["FakeDaemon", "running"]


class FakeDaemon:
    """Answers as the daemon's control API does, in a thread of its own; methods may be called from any."""

    def __init__(self, socket: Path, state: ClusterState) -> None:
        self.socket = socket
        self.state = state
        self.requests: list[str] = []
        self.bodies: list[bytes] = []
        self.log: list[str] = [
            "INFO first line",
            "\x1b[31mERROR\x1b[0m it broke [/]",
            "plain \x1b]52;c;aGk=\x07 end",
        ]
        self.answer: list[bytes] = []
        self.refusal = ""
        self.streams = 0
        self._queues: list[asyncio.Queue[bytes]] = []
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.AbstractServer | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Listens."""
        if not self._thread.is_alive():
            self._thread.start()
        self._wait(self._listen())

    def stop(self) -> None:
        """Closes the socket and every connection, as a daemon that was killed."""
        self._wait(self._close())

    def end(self) -> None:
        """Stops, and ends the thread."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def change(self, change: Change) -> None:
        """Applies a change and sends it to all who listen."""
        self.state = self.state.apply(change)
        data = b"event: change\nid: %d\ndata: %s\n\n" % (change.seq, msgspec.json.encode(change))
        self._loop.call_soon_threadsafe(self._send, data)

    def _send(self, data: bytes) -> None:
        for queue in self._queues:
            queue.put_nowait(data)

    def _wait(self, coroutine: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _listen(self) -> None:
        self.socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self.socket))

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.socket.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split(" ", 2)
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        body = await reader.readexactly(int(length[1])) if length else b""
        path = target.partition("?")[0]
        self.requests.append(f"{method} {target}")
        self.bodies.append(body)
        if path == "/v1/events":
            await self._events(reader, writer)
        elif path.startswith("/v1/logs/"):
            _head(writer, "200 OK", "text/plain")
            for line in self.log:
                _chunk(writer, line.encode("utf-8", "surrogatepass") + b"\n")
            await writer.drain()
            await reader.read(1)
        elif path == "/v1/prompt" and not self.refusal:
            _head(writer, "200 OK", "text/event-stream")
            for piece in self.answer:
                _chunk(writer, piece)
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        elif self.refusal:
            _whole(writer, "409 Conflict", msgspec.json.encode({"error": {"message": self.refusal}}))
        elif path == "/v1/state":
            _whole(writer, "200 OK", msgspec.json.encode(self.state))
        else:
            _whole(writer, "202 Accepted", b'{"name":"encoder-9"}')
        await writer.drain()

    async def _events(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        _head(writer, "200 OK", "text/event-stream")
        _chunk(writer, b"event: snapshot\ndata: " + msgspec.json.encode(self.state) + b"\n\n")
        self._queues.append(queue)
        self.streams += 1
        gone = asyncio.ensure_future(reader.read(1))
        gone.add_done_callback(lambda _: queue.put_nowait(b""))
        try:
            while data := await queue.get():
                _chunk(writer, data)
                await writer.drain()
        finally:
            gone.cancel()
            self.streams -= 1
            self._queues.remove(queue)


def _head(writer: asyncio.StreamWriter, status: str, kind: str) -> None:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head.encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _whole(writer: asyncio.StreamWriter, status: str, data: bytes) -> None:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


@contextlib.contextmanager
def running(state: ClusterState) -> Iterator[FakeDaemon]:
    """A daemon with this state on a socket in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="ec") as directory:
        daemon = FakeDaemon(Path(directory) / "control.sock", state)
        daemon.start()
        try:
            yield daemon
        finally:
            daemon.end()

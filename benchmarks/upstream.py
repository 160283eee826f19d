"""One process that is every encoder and the PD: answers each POST at once, on as many ports as asked.

`python benchmarks/upstream.py FIRST_PORT COUNT [SSE_EVENTS] [EVENT_GAP_MS]`

A body with `"stream":true` among its last 400 bytes gets SSE_EVENTS small events, EVENT_GAP_MS apart.
It also answers what proxies probe: /health, /metrics (with a process start time), /v1/models.
"""

import asyncio
import sys
import time
from typing import cast

import uvloop

ANSWER = (
    b'{"id":"chatcmpl-x","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)
EVENT = (
    b'data: {"id":"chatcmpl-x","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"tok"},"finish_reason":null}]}\n\n'
)
LAST = EVENT.replace(b'"finish_reason":null', b'"finish_reason":"stop"') + b"data: [DONE]\n\n"
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","root":"m"}]}'
METRICS = b"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds %.2f\n" % time.time()

EVENTS = int(sys.argv[3]) if len(sys.argv) > 3 else 256
GAP_S = float(sys.argv[4]) / 1000 if len(sys.argv) > 4 else 0.0


def response(body: bytes, kind: bytes = b"application/json") -> bytes:
    """A whole 200."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(body)) + body


def chunk(data: bytes) -> bytes:
    """One piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


GET = {
    b"/v1/models": response(MODELS),
    b"/metrics": response(METRICS, b"text/plain"),
    b"/health": response(b""),
}
POST = response(ANSWER)
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


class Upstream(asyncio.Protocol):
    """Reads whole requests; never parses JSON."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self.buffer = bytearray()
        self.need = -1
        self.path = b""
        self.tasks: set[asyncio.Task[None]] = set()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while self.whole_request():
            body_end = bytes(self.buffer[max(0, self.need - 400) : self.need]).replace(b": ", b":")
            del self.buffer[: self.need]
            self.need = -1
            if self.path in GET:
                self.transport.write(GET[self.path])
            elif b'"stream":true' in body_end:
                task = asyncio.ensure_future(self.stream())
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            else:
                self.transport.write(POST)

    def whole_request(self) -> bool:
        """Whether the buffer starts with one; `need` is its length."""
        if self.need < 0:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return False
            head = bytes(self.buffer[:end])
            self.path = head.split(b" ", 2)[1].partition(b"?")[0]
            at = head.lower().find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            self.need = end + 4 + length
        return len(self.buffer) >= self.need

    async def stream(self) -> None:
        """Event after event; stops when the reader is gone."""
        self.transport.write(HEAD)
        for _ in range(EVENTS - 1):
            if self.transport.is_closing():
                return
            self.transport.write(chunk(EVENT))
            await asyncio.sleep(GAP_S)
        if not self.transport.is_closing():
            self.transport.write(chunk(LAST) + b"0\r\n\r\n")


async def main() -> None:
    """Listens on consecutive loopback ports until it is ended."""
    loop = asyncio.get_running_loop()
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for port in range(first, first + count):
        await loop.create_server(Upstream, "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


uvloop.run(main())

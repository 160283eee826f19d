"""One request on a route that reaches a server behind: its body in, its answer out, its end noted.

Whatever happens, the client gets a whole answer, an error in OpenAI's shape, or a stream that visibly
breaks; and when the client leaves, the task that serves it is cancelled within the same turn of the loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from eccon_proxy.errors import Failure, bad_request
from eccon_proxy.errors import upstream as upstream_failure
from eccon_proxy.guard import Head, LostError, is_lost_answer, placeholder
from eccon_proxy.headers import answer_headers, request_headers
from eccon_proxy.log import logger
from eccon_proxy.pd import Forward
from eccon_proxy.requestid import new_id, usable
from eccon_proxy.schema import Outcome
from eccon_proxy.sse import StreamTap, before_end, error_event, tokens
from eccon_proxy.upstream import Response, UpstreamError

if TYPE_CHECKING:
    from eccon_proxy.core import Core

__all__ = ["Exchange", "Handler", "serve"]

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
WHOLE = 1024 * 1024
"""Answers up to this size that are no streams are sent when whole, so that a break is an error."""


class Connection(Protocol):
    """What is asked of the connection that a request came on."""

    on_lost: Callable[[], None] | None
    transport: asyncio.Transport


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "_connection", "_gone", "_receive", "_send", "_stop", "_task", "answered", "authorization", "body",
        "busy", "content_type", "core", "encoding", "error", "length", "route", "scope",
        "started", "status", "trace",
    )  # fmt: skip

    def __init__(self, core: "Core", scope: Scope, receive: Receive, send: Send, route: str) -> None:
        self.core = core
        self.scope = scope
        self.route = route
        self._receive = receive
        self._send = send
        self._gone = False
        self._stop: Failure | None = None
        self._task = asyncio.current_task()
        self._connection: Connection = scope["eccon.connection"]
        self.started = False
        """Whether our status is out."""
        self.answered = False
        self.busy = False
        self.status = 0
        self.error = ""
        self.body: bytes | bytearray = b""
        self.authorization: bytes | None = None
        self.content_type = b""
        self.encoding = b""
        self.length: int | None = None
        client_id = b""
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                client_id = value
            elif name == b"authorization":
                self.authorization = value
            elif name == b"content-type":
                self.content_type = value
            elif name == b"content-encoding":
                self.encoding = value
            elif name == b"content-length" and value.isdigit():
                self.length = int(value)
        self.trace = core.traces.begin(client_id.decode() if usable(client_id) else new_id(), route)
        if core.exporter is not None:
            self.trace.root = core.exporter.begin(
                scope["headers"], scope["method"], route, self.trace.started_at
            )

    @property
    def path(self) -> bytes:
        """Route and query, as they go upstream."""
        query: bytes = self.scope.get("query_string", b"")
        return b"%b?%b" % (self.route.encode(), query) if query else self.route.encode()

    def upstream_headers(self) -> bytes:
        """Lines for the servers behind; raises 401 when the client's key is none of ours."""
        authorization = self.core.keys.check(self.authorization)
        root = self.trace.root
        return request_headers(self.scope["headers"], authorization, root.lines if root is not None else b"")

    # the request

    def check_type(self) -> None:
        """Only JSON, as vLLM, and only as it is."""
        kind = self.content_type.partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise Failure(
                415,
                "Unsupported Media Type: only application/json is allowed",
                kind="invalid_request_error",
                headers=((b"accept", b"application/json"),),
            )
        if self.encoding and self.encoding.strip().lower() != b"identity":
            raise Failure(
                415,
                "Bodies with a content encoding are not taken; send it as it is",
                kind="invalid_request_error",
                headers=((b"accept-encoding", b"identity"),),
            )

    async def read_body(self) -> bytes | bytearray:
        """The whole body, held once; from its end on the client is watched."""
        limit = self.core.settings.max_body
        if self.length is not None and self.length > limit:
            raise self._too_long(limit)
        timer = asyncio.get_running_loop().call_later(self.core.settings.body_timeout, self._body_late)
        try:
            message = await self._message()
            data: bytes = message["body"]
            if message["more_body"]:
                self.body = await self._read_rest(data, limit)
            else:
                self.body = data
        finally:
            timer.cancel()
        if len(self.body) > limit:
            raise self._too_long(limit)
        self.core.metrics.body_bytes.add(by=len(self.body))
        self.watch()
        return self.body

    def watch(self) -> None:
        """Be cancelled when the client leaves, from here on."""
        self._connection.on_lost = self._lost

    async def _read_rest(self, data: bytes, limit: int) -> bytearray:
        # With the length known the buffer is made once: no second copy of what may be megabytes.
        body = bytearray(self.length or len(data))
        at = 0
        while True:
            end = at + len(data)
            if end > limit:
                raise self._too_long(limit)
            if end > len(body):
                body += bytes(max(end, 2 * len(body)) - len(body))
            body[at:end] = data
            at = end
            message = await self._message()
            data = message["body"]
            if not message["more_body"]:
                if len(body) != at + len(data):
                    del body[at:]
                    body += data
                else:
                    body[at:] = data
                return body

    async def _message(self) -> dict[str, Any]:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._gone = True
            raise asyncio.CancelledError
        return message

    def _too_long(self, limit: int) -> Failure:
        # The connection stays: a close while the client still sends would be a reset to it, and it would
        # never read why. The rest of its body is read and dropped, for as long as a body may take.
        return Failure(413, f"The body is longer than {limit} bytes", kind="invalid_request_error")

    def _body_late(self) -> None:
        self.stop(
            Failure(
                408,
                "The body did not come in time",
                kind="timeout_error",
                headers=((b"connection", b"close"),),
            )
        )

    def _lost(self) -> None:
        if not self.answered and self._task is not None:
            self._gone = True
            self._task.cancel()

    def stop(self, failure: Failure) -> None:
        """End it with an error: a deadline has passed, or the proxy ends."""
        if not self.answered and self._stop is None and self._task is not None:
            self._stop = failure
            self._task.cancel()

    # the answer

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole answer."""
        self.status = status
        self.started = True
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.answered = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def start_over(self, reason: str) -> None:
        """What was begun at the PD came to nothing, and nothing of it is out."""
        self.status = 0
        self.trace.first_byte = None
        for span in self.trace.spans:
            if span.kind in {"pd", "stream"} and span.outcome == "ok":
                span.close()
                span.outcome, span.error = "error", reason

    async def fail(self, failure: Failure) -> None:
        """Send an error of ours, in the form that is still possible."""
        self.error = failure.message
        self.busy = failure.code == "busy"
        if not self.started:
            headers = failure.headers
            headers.append((b"x-request-id", self.trace.id.encode()))
            await self.answer(failure.status, headers, failure.body)

    async def relay(
        self, response: Response, forward: Forward, *, guarded: bool = False, again: bool = False
    ) -> None:
        """Pass an answer on, byte for byte.

        `guarded`: raises `LostError` when it shows that the PD ended the request for a lost item and the
        client has got nothing yet. A PD's own error is passed on all the same unless it is tried `again`.
        """
        headers, is_stream = answer_headers(response.headers, self.trace.id.encode())
        self.status = response.status
        broken = False
        try:
            if is_stream:
                self.trace.stream = True
                tap = StreamTap(watch_end=guarded)
                await self._relay_stream(response, forward, headers, tap, Head() if guarded else None)
            else:
                await self._relay_whole(response, forward, headers, guarded=guarded, again=again)
        except UpstreamError as error:
            broken = error.cause != "timeout"
            await self._broke(error, is_stream=is_stream)
        finally:
            response.close()
            forward.end(broken=broken)

    async def _relay_whole(
        self,
        response: Response,
        forward: Forward,
        headers: list[tuple[bytes, bytes]],
        *,
        guarded: bool,
        again: bool,
    ) -> None:
        body = await response.read_all(WHOLE)
        if guarded and body is not None:
            if placeholder(body):
                raise LostError("The PD answered with zeros in place of an item")
            if again and is_lost_answer(response.status, body) and await forward.pd.lives_on():
                raise LostError("The PD could not get an item")
        self._first_byte(response, forward)
        if body is None:
            await self._relay_stream(response, forward, headers, None, None)
            return
        usage = tokens(body)
        self.trace.prompt_tokens = usage.get(b"prompt")
        self.trace.completion_tokens = usage.get(b"completion")
        self.core.metrics.relay_bytes.add(by=len(body))
        await self.answer(response.status, headers, body)

    async def _relay_stream(
        self,
        response: Response,
        forward: Forward,
        headers: list[tuple[bytes, bytes]],
        tap: StreamTap | None,
        head: Head | None,
    ) -> None:
        send, read = self._send, response.read
        if (length := response.header(b"content-length")) is not None:
            headers.append((b"content-length", length))
        if head is None:
            await self._begin(response.status, headers)
        total = 0
        try:
            while data := await read():
                if forward.unanswered:
                    self._first_byte(response, forward)
                if head is not None:
                    verdict = head.feed(data)
                    if verdict == "hold":
                        continue
                    if verdict == "lost" or placeholder(head.held):
                        raise LostError("The PD could not get an item")
                    data, head = bytes(head.held), None
                    await self._begin(response.status, headers)
                total += len(data)
                if tap is not None:
                    tap.feed(data)
                    if tap.spoilt:
                        event = error_event(upstream_failure(tap.spoilt, code="item_lost").body)
                        data, tap.spoilt = before_end(data, event), ""
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self.core.metrics.relay_bytes.add(by=total)
            if tap is not None:
                self.error = tap.error
                usage = tap.usage()
                self.trace.prompt_tokens = usage.get(b"prompt")
                self.trace.completion_tokens = usage.get(b"completion")
        if forward.unanswered:
            self._first_byte(response, forward)
        if head is not None:
            raise LostError("The PD ended its answer before it had begun")
        self.answered = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _first_byte(self, response: Response, forward: Forward) -> None:
        forward.first_byte(used=response.status == 200)
        if response.status == 200 and self.trace.model:
            forward.pd.asked_for = self.trace.model
        response.silence(self.core.settings.stream_idle_timeout)
        self.trace.first_byte = time.perf_counter()
        for span in self.trace.spans:
            if span.kind == "pd":
                span.close()
        self.trace.span("stream")  # ended with the trace

    async def _broke(self, error: UpstreamError, *, is_stream: bool) -> None:
        """The answer ended before its end."""
        message = f"The PD's answer broke off: {error}"
        failure = upstream_failure(message, status=504 if error.cause == "timeout" else 502)
        if not self.started:
            raise failure
        self.error = message
        if is_stream:
            await self.send_event(error_event(failure.body))
        await self.cut()

    async def send_event(self, event: bytes) -> None:
        """Send one event of ours in a stream under way."""
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def cut(self) -> None:
        """Close the connection without an end of the answer, so that the client sees it is not whole."""
        self.answered = True
        self._connection.transport.close()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # the end

    def end(self) -> None:
        """Note how it ended."""
        self._connection.on_lost = None
        core = self.core
        if self._gone and not self.answered:
            outcome: Outcome = "client_closed"
            self.status = 499
            self.error = self.error or "the client left"
        else:
            outcome = "busy" if self.busy else _outcome(self.status, self.error)
        self.trace.finish(self.status, outcome, self.error)
        core.finished(self.trace)

    @property
    def gone(self) -> bool:
        """Whether the client left."""
        return self._gone

    @property
    def stopped(self) -> Failure | None:
        """The error that ended it from outside."""
        return self._stop


def _outcome(status: int, error: str) -> Outcome:
    if status < 400:
        return "upstream_error" if error else "ok"
    if status == 429:
        return "busy"
    return "client_error" if status < 500 else "upstream_error"


Handler = Callable[[Exchange], Awaitable[None]]


async def serve(
    core: "Core", scope: Scope, receive: Receive, send: Send, route: str, handler: Handler
) -> None:
    """Run a handler for one request, whatever comes."""
    exchange = Exchange(core, scope, receive, send, route)
    core.exchanges.add(exchange)
    try:
        try:
            await handler(exchange)
        except Failure as failure:
            await exchange.fail(failure)
        except RecursionError:
            await exchange.fail(bad_request("The body's JSON is nested too deeply"))
    except asyncio.CancelledError:
        if exchange.stopped is not None and not exchange.gone:
            await _stopped(exchange, exchange.stopped)
        elif not exchange.gone:
            raise
    except Exception:  # noqa: BLE001  a fault of ours: the client gets an answer, the log the traceback
        logger.exception("request %s failed", exchange.trace.id)
        exchange.error = "internal error"
        if not exchange.started:
            await exchange.fail(Failure(500, "Internal error of the proxy", kind="internal_error"))
        else:
            await exchange.cut()
    finally:
        core.exchanges.discard(exchange)
        exchange.end()


async def _stopped(exchange: Exchange, failure: Failure) -> None:
    if not exchange.started:
        await exchange.fail(failure)
        return
    exchange.error = failure.message
    if exchange.trace.stream:
        await exchange.send_event(error_event(failure.body))
    await exchange.cut()

"""One chat completion: from body to answer, whole or streamed, and its end when the client is gone."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from eccon.sim.answers import DONE, Collected, Streamed
from eccon.sim.chat import Chat, UnparsableError, loads, read, too_long
from eccon.sim.client import EngineClient
from eccon.sim.errors import DEAD, ApiError, LostError
from eccon.sim.flags import Serve
from eccon.sim.ipc import Add, Output
from eccon.sim.items import Items
from eccon.sim.metrics import Metrics

__all__ = ["Serving"]

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


class _GoneError(Exception):
    """The client closed its connection."""


class Serving:
    """Answers `/v1/chat/completions`."""

    def __init__(
        self, serve: Serve, max_model_len: int, engine: EngineClient, items: Items, metrics: Metrics
    ) -> None:
        self._serve = serve
        self._max_model_len = max_model_len
        self._engine = engine
        self._items = items
        self._metrics = metrics

    async def chat(self, headers: dict[str, bytes], request_id: str, receive: Receive, send: Send) -> bool:
        """Answer one request; True when it failed because the engine is dead."""
        try:
            return await self._answer(headers, request_id, receive, send)
        except _GoneError:
            return False

    async def _answer(self, headers: dict[str, bytes], request_id: str, receive: Receive, send: Send) -> bool:
        try:
            if headers.get("content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
                msg = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
                raise ApiError(msg, type_="Bad Request")
            chat = read(self._serve, self._max_model_len, loads(await _body(receive)))
            answer_id = f"chatcmpl-{request_id or secrets.token_hex(8)}"
            gone = asyncio.create_task(_disconnected(receive))
            work = asyncio.create_task(self._run(chat, answer_id, send))
            try:
                await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise _GoneError
                return bool(work.result())
            finally:
                for task in (gone, work):
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, ApiError):
                        await task
        except UnparsableError:
            await _whole(send, 400, b'{"detail":"There was an error parsing the body"}')
            return False
        except ApiError as e:
            await _whole(send, e.status, e.body())
            return _is_dead(e)

    async def _run(self, chat: Chat, answer_id: str, send: Send) -> bool:
        if self._engine.errored:
            raise ApiError(DEAD, status=500, type_="InternalServerError")
        items = await self._items.of(chat)
        prompt = chat.text_tokens + sum(i.tokens for i in items)
        room = self._max_model_len - prompt
        if room < (chat.max_tokens or 1) and self._serve.role != "producer":
            raise too_long(self._max_model_len, prompt, chat.max_tokens or 1)
        add = Add(
            id=f"{answer_id}-{secrets.token_hex(4)}",  # clients may use an id twice, the engine may not
            items=items,
            text_tokens=chat.text_tokens,
            max_tokens=chat.max_tokens or room,
            min_tokens=chat.min_tokens,
            n=chat.n,
            text=chat.last_text,
            wait_s=chat.guard_wait_s,
        )
        outputs = self._engine.generate(add)
        self._metrics.arrived(add.id)
        ended = False
        try:
            deliver = self._stream if chat.stream else self._collect
            failed = await deliver(chat, answer_id, outputs, send)
            ended = True
            return failed
        finally:
            self._metrics.left(add.id, ended=ended)
            await outputs.aclose()

    async def _collect(self, chat: Chat, answer_id: str, outputs: AsyncIterator[Output], send: Send) -> bool:
        answer = Collected(chat, answer_id)
        async for output in outputs:
            answer.take(output)
        await _whole(send, 200, answer.body())
        return False

    async def _stream(self, chat: Chat, answer_id: str, outputs: AsyncIterator[Output], send: Send) -> bool:
        kind = (b"content-type", b"text/event-stream; charset=utf-8")
        # Before anything is known of the answer: a request that fails later has said 200 already.
        await send({"type": "http.response.start", "status": 200, "headers": [kind]})
        answer = Streamed(chat, answer_id)
        failed = False
        try:
            async for output in outputs:
                events = answer.events(output)
                await send({"type": "http.response.body", "body": events, "more_body": True})
            last = answer.end()
        except LostError:
            last = answer.begin() + DONE
        except ApiError as e:
            last = e.event() + DONE
            failed = _is_dead(e)
        await send({"type": "http.response.body", "body": last, "more_body": False})
        return failed


def _is_dead(error: ApiError) -> bool:
    return str(error) == DEAD


async def _body(receive: Receive) -> bytes:
    pieces = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _GoneError
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(send: Send, status: int, body: bytes) -> None:
    head = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})

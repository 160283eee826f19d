"""Fakes that behave like the encoders and the PD of one cluster, and a ledger that knows who staged what."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import CHAT, Exchange, Fake, Handler, Seen
from tests.proxy.classify import canonical, media_parts

__all__ = [
    "MODEL",
    "PD",
    "Encoder",
    "Ledger",
    "Staged",
    "after",
    "completion",
    "event",
    "refuse",
    "sse",
    "stream",
]

MODEL = "m"


@dataclass(frozen=True)
class Staged:
    """One item that an encoder has answered with 200 for."""

    encoder: str
    content: str
    epoch: float
    at: float


@dataclass
class Ledger:
    """Who staged what, and every time a PD was handed an item that nobody had staged for it."""

    staged: dict[str, list[Staged]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all."""
        self.staged.clear()
        self.violations.clear()

    def record(self, encoder: str, body: Any, epoch: float) -> None:
        """Note the items of a request that this encoder has encoded, under uuid and under content."""
        for media in media_parts(body):
            content = canonical(media.part)
            staged = Staged(encoder, content, epoch, time.monotonic())
            self.staged.setdefault(content, []).append(staged)
            if media.part.get("uuid") is not None:
                self.staged.setdefault(media.part["uuid"], []).append(staged)

    def check(self, body: Any, epoch: float) -> None:
        """Hold a PD's request against what is staged."""
        for media in media_parts(body):
            content = canonical(media.part)
            held = self.staged.get(media.part.get("uuid") or content, [])
            if not any(item.content == content and item.epoch == epoch for item in held):
                self.violations.append(
                    f"not staged in epoch {epoch}: {media.part!r:.200}; held: {held!r:.300}"
                )


def completion(text: str = "ok", tokens: int = 1) -> dict[str, Any]:
    """A whole answer in OpenAI's shape."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens},
    }


def event(text: str | None = "ok", finish: str | None = None) -> bytes:
    """One event of a streamed answer."""
    delta = {} if text is None else {"content": text}
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    return sse(json.dumps(chunk, ensure_ascii=False))


def sse(data: str) -> bytes:
    """One server-sent event."""
    return f"data: {data}\n\n".encode()


DONE = sse("[DONE]")


def stream(*events: bytes) -> Handler:
    """Stream these bytes, a chunk each, and end well."""

    async def handle(exchange: Exchange) -> None:
        await exchange.start()
        for data in events or (event("ok"), event(None, "stop"), DONE):
            await exchange.chunk(data)
        await exchange.finish()

    return handle


def refuse(status: int, message: str, kind: str = "BadRequestError") -> Handler:
    """Answer with an error in vLLM's shape."""

    async def handle(exchange: Exchange) -> None:
        await exchange.error(status, message, kind)

    return handle


def after(ready: asyncio.Event, then: Handler) -> Handler:
    """Answer only when the event is set; give up when the peer goes."""

    async def handle(exchange: Exchange) -> None:
        gone = asyncio.ensure_future(exchange.until_gone())
        go = asyncio.ensure_future(ready.wait())
        try:
            await asyncio.wait((gone, go), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            go.cancel()
        if not exchange.peer_gone:
            await then(exchange)

    return handle


async def _ok(exchange: Exchange) -> None:
    await exchange.answer(200, b"", ())


class _Vllm(Fake):
    """What both roles share."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        super().__init__(name)
        self.ledger = ledger
        self.running = 0
        self.waiting = 0
        self.generated = 0
        self.started_at = 1.7e9
        self.reset()

    def reset(self) -> None:
        """Behave well again and forget what was seen."""
        self.routes.clear()
        self.once.clear()
        self.seen.clear()
        self.errors.clear()
        self.anything = None
        self.running = self.waiting = self.generated = 0
        self.always(_ok, "/health", "GET")
        self.always(self.metrics, "/metrics", "GET")
        self.always(self.models, "/v1/models", "GET")
        self.always(self.version, "/version", "GET")
        self.always(self.chat)

    async def chat(self, exchange: Exchange) -> None:
        """Answer a chat request well."""
        raise AssertionError(f"{self.name} has no chat of its own: {exchange.seen.path}")

    async def models(self, exchange: Exchange) -> None:
        """List the model as vLLM does, with keys that a proxy must not lose."""
        card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": MODEL}
        await exchange.json(
            200, {"object": "list", "data": [{**card, "parent": None, "max_model_len": 4096}]}
        )

    async def version(self, exchange: Exchange) -> None:
        """Say which vLLM this is."""
        await exchange.json(200, {"version": "0.30.0"})

    async def metrics(self, exchange: Exchange) -> None:
        """Show the families that a proxy looks at."""
        label = f'{{engine="0",model_name="{MODEL}"}}'
        lines = (
            "# TYPE process_start_time_seconds gauge",
            f"process_start_time_seconds {self.started_at!r}",
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{label} {float(self.running)}",
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{label} {float(self.waiting)}",
            "# TYPE vllm:generation_tokens_total counter",
            f"vllm:generation_tokens_total{label} {float(self.generated)}",
            "# TYPE vllm:prompt_tokens_total counter",
            f"vllm:prompt_tokens_total{label} {float(self.generated)}",
        )
        body = "\n".join((*lines, "")).encode()
        await exchange.answer(200, body, (("content-type", "text/plain; version=0.0.4; charset=utf-8"),))


class Encoder(_Vllm):
    """Encodes whatever it is given, at once, and pushes it to one PD."""

    def __init__(self, name: str, ledger: Ledger, pd: "PD") -> None:
        super().__init__(name, ledger)
        self.pd = pd

    async def chat(self, exchange: Exchange) -> None:
        """Encode: an encoder's 200 has empty content."""
        body = exchange.seen.json()
        self.ledger.record(self.name, body, self.pd.started_at)
        await exchange.json(200, completion("", 0))

    @property
    def encodes(self) -> list[Seen]:
        """The items that it was asked to encode."""
        return self.requests()


class PD(_Vllm):
    """Answers chat requests; the ledger keeps every item that was not staged for its present life."""

    async def chat(self, exchange: Exchange) -> None:
        """Answer as the request asks, streamed or whole."""
        self.generated += 1
        if exchange.seen.json().get("stream"):
            await stream()(exchange)
        else:
            await exchange.json(200, completion())

    def handler(self, seen: Seen) -> Handler:
        """Check each request's items on arrival, whatever the answer will be."""
        if seen.path.startswith(CHAT) and seen.body:
            try:
                body = json.loads(seen.body)
            except ValueError:
                body = None
            self.ledger.check(body, self.started_at)
        return super().handler(seen)

    @property
    def calls(self) -> list[Seen]:
        """What clients asked, without the proxy's own one-token text requests."""
        return [seen for seen in self.requests() if not self._own(seen)]

    @property
    def own(self) -> list[Seen]:
        """The proxy's own requests: canaries and flushes."""
        return [seen for seen in self.requests() if self._own(seen)]

    @staticmethod
    def _own(seen: Seen) -> bool:
        try:
            body = json.loads(seen.body)
        except ValueError:
            return False
        return isinstance(body, dict) and body.get("max_tokens") == 1 and not media_parts(body)

    async def die(self) -> None:
        """Be killed: every connection is reset, the port refuses, what was staged is lost."""
        await self.stop(abort=True)

    async def come_back(self) -> None:
        """Start another life on the same port."""
        self.started_at += 100.0
        await self.start()

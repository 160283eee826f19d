"""The HTTP face as an ASGI application: routes, key check, request ids. Chat completions are `serving`'s."""

import hmac
import json
import os
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from eccon.sim.client import EngineClient
from eccon.sim.faults import Faults
from eccon.sim.flags import Serve
from eccon.sim.items import Items
from eccon.sim.metrics import Metrics
from eccon.sim.modeldir import Model
from eccon.sim.release import release
from eccon.sim.serving import Serving

__all__ = ["Api"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

CHAT = "/v1/chat/completions"


class Api:
    """One server's application. `on_failure` is called when a request failed because the engine is dead."""

    def __init__(
        self, serve: Serve, model: Model, engine: EngineClient, faults: Faults, on_failure: Callable[[], None]
    ) -> None:
        self._serve = serve
        self._model = model
        self._engine = engine
        self._faults = faults
        self._on_failure = on_failure
        self._items = Items(serve, model)
        self._metrics = Metrics(serve.served_names[0])
        self._serving = Serving(serve, model.max_model_len, engine, self._items, self._metrics)
        own = os.environ.get("VLLM_API_KEY")
        self._keys = tuple(k.encode() for k in (serve.api_keys or ((own,) if own else ())))
        self._load = 0
        self._gets: dict[str, Callable[[], bytes]] = {
            "/ping": lambda: b"",
            "/version": lambda: _json({"version": release().version}),
            "/load": lambda: _json({"server_load": self._load if serve.server_load else 0}),
            "/v1/models": self._models,
            "/metrics": lambda: self._metrics.text(engine.stats, self._items.lookups),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._engine.on_step = self._metrics.step
                await self._engine.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        headers = {k.decode("latin-1"): v for k, v in scope["headers"]}
        request_id = headers.get("x-request-id", b"").decode("latin-1")
        extra: list[tuple[bytes, bytes]] = []
        if self._serve.request_id_headers:
            extra.append((b"x-request-id", (request_id or uuid.uuid4().hex).encode("latin-1")))
        handler = path if path in self._gets or path in {CHAT, "/health"} else "none"

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                vary = [(b"vary", b"Origin")] if message["status"] != 500 else []  # as vLLM's layers have it
                message["headers"] = [*message["headers"], *vary, *extra]
                self._metrics.http(handler, method, message["status"])
            await send(message)

        if path.startswith("/v1") and method != "OPTIONS" and not self._authorised(headers):
            await respond(answer, 401, b'{"error":"Unauthorized"}')
        elif path == CHAT and method == "POST":
            self._load += 1
            try:
                failed = await self._serving.chat(headers, request_id, receive, answer)
            finally:
                self._load -= 1
            if failed:
                self._on_failure()
        else:
            await self._plain(path, method, receive, answer)

    def _authorised(self, headers: dict[str, bytes]) -> bool:
        if not self._keys:
            return True
        scheme, _, token = headers.get("authorization", b"").partition(b" ")
        # All are compared, in constant time: which key it was is nobody's business.
        known = [hmac.compare_digest(token, k) for k in self._keys]
        return scheme.lower() == b"bearer" and any(known)

    async def _plain(self, path: str, method: str, receive: Receive, send: Send) -> None:
        allowed = {CHAT: {"POST"}, "/ping": {"GET", "POST"}, "/health": {"GET"}}.get(path, {"GET"})
        if path not in self._gets and path not in {CHAT, "/health"}:
            await respond(send, 404, b'{"detail":"Not Found"}')
        elif method not in allowed:
            body = b"" if method == "HEAD" else b'{"detail":"Method Not Allowed"}'
            allow = (b"allow", ", ".join(sorted(allowed)).encode())
            await respond(send, 405, body, headers=[allow])
        elif path == "/health":
            if self._faults.take("health-hang"):
                while (await receive())["type"] != "http.disconnect":
                    pass
            await respond(send, 503 if self._engine.errored else 200, b"", kind=None)
        else:
            kind = b"application/json"
            if path == "/metrics":
                kind = b"text/plain; version=1.0.0; charset=utf-8"
            await respond(send, 200, self._gets[path](), kind=None if path == "/ping" else kind)

    def _models(self) -> bytes:
        now = int(time.time())
        permission = {
            "id": f"modelperm-{secrets.token_hex(8)}",
            "object": "model_permission",
            "created": now,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        cards = [
            {
                "id": name,
                "object": "model",
                "created": now,
                "owned_by": "vllm",
                "root": self._serve.model,
                "parent": None,
                "max_model_len": self._model.max_model_len,
                "permission": [permission],
            }
            for name in self._serve.served_names
        ]
        return _json({"object": "list", "data": cards})


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


async def respond(
    send: Send,
    status: int,
    body: bytes,
    *,
    kind: bytes | None = b"application/json",
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    """A whole answer."""
    head = [(b"content-length", str(len(body)).encode()), *(headers or [])]
    if kind is not None:
        head.append((b"content-type", kind))
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})

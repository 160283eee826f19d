"""The public routes: Litestar's wiring, and errors in OpenAI's shape."""

from collections.abc import Callable
from typing import Any

import msgspec
from litestar import Litestar, Request, Response, asgi
from litestar.config.cors import CORSConfig
from litestar.exceptions import HTTPException
from litestar.handlers import ASGIRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from eccon_proxy.chat import chat
from eccon_proxy.core import Core
from eccon_proxy.errors import error_body
from eccon_proxy.exchange import Handler, serve
from eccon_proxy.health import health, ready
from eccon_proxy.log import logger
from eccon_proxy.passthrough import get, post

__all__ = ["on_error", "public_app"]

Answer = Callable[[], tuple[int, bytes, bytes]]
JSON = b"application/json"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"


CHAT = "/v1/chat/completions"


def public_app(core: Core) -> ASGIApp:
    """What clients see; the admin API is another application on another listener.

    The one route that matters for speed is looked at before Litestar's router: that saves a tenth of the
    CPU of a text request. Everything else about it is Litestar's.
    """
    litestar = _litestar(core)
    if core.settings.cors_origins:
        return litestar

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == CHAT and scope["method"] == "POST":  # type: ignore[typeddict-item]
            await serve(core, scope, receive, send, CHAT, chat)  # type: ignore[arg-type]
        else:
            await litestar(scope, receive, send)

    return app


def _litestar(core: Core) -> Litestar:

    def told(read: Callable[[Core], tuple[int, dict[str, object]]]) -> Answer:
        def answer() -> tuple[int, bytes, bytes]:
            status, body = read(core)
            return status, JSON, msgspec.json.encode(body)

        return answer

    routes = [
        _proxied(core, CHAT, b"POST", chat),
        *(_proxied(core, path, b"POST", post) for path in (
            "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize",
        )),
        *(_proxied(core, path, b"GET", get) for path in ("/v1/models", "/version")),
        _own("/health", told(health)),
        _own("/readyz", told(ready)),
        _own("/livez", lambda: (200, JSON, b'{"live":true}')),
        _own("/metrics", lambda: (200, TEXT, core.metrics.render())),
    ]  # fmt: skip
    origins = list(core.settings.cors_origins)
    return Litestar(
        routes,
        openapi_config=None,
        logging_config=None,
        cors_config=CORSConfig(allow_origins=origins) if origins else None,
        exception_handlers={Exception: on_error},
    )


def _proxied(core: Core, path: str, method: bytes, handler: Handler) -> ASGIRouteHandler:
    methods = _methods(method)

    @asgi(path, copy_scope=False)
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in methods:  # type: ignore[typeddict-item]
            await serve(core, scope, receive, send, path, handler)  # type: ignore[arg-type]
        else:
            await _other_method(scope, send, methods)

    return route


def _own(path: str, answer: Answer) -> ASGIRouteHandler:
    methods = _methods(b"GET")

    @asgi(path, copy_scope=False)
    async def route(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
        if scope["method"] in methods:  # type: ignore[typeddict-item]
            await _send(send, *answer())
        else:
            await _other_method(scope, send, methods)

    return route


def _methods(method: bytes) -> tuple[str, ...]:
    return ("GET", "HEAD") if method == b"GET" else (method.decode(),)


async def _other_method(scope: Scope, send: Send, methods: tuple[str, ...]) -> None:
    allow = (b"allow", ", ".join((*methods, "OPTIONS")).encode())
    if scope["method"] == "OPTIONS":  # type: ignore[typeddict-item]
        await send({"type": "http.response.start", "status": 204, "headers": [allow]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return
    body = error_body("Method Not Allowed", "invalid_request_error", 405)
    await _send(send, 405, JSON, body, allow)


async def _send(send: Send, status: int, kind: bytes, body: bytes, *extra: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def on_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Whatever Litestar raises, in OpenAI's shape."""
    status = getattr(error, "status_code", 500)
    if isinstance(error, HTTPException):
        message = str(error.detail) or type(error).__name__
        headers = dict(error.headers or {})
    else:
        logger.error("a route failed", exc_info=error)
        message, headers = "Internal error of the proxy", {}
    if status == 404 and message in {"Not Found", "NotFoundException"}:
        message = f"Not Found: {request.url.path}"
    kind = "invalid_request_error" if status < 500 else "internal_error"
    body = error_body(message, kind, status)
    return Response(body, status_code=status, headers=headers, media_type="application/json")

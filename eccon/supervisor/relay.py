"""Carries a test prompt to the proxy's public port and its answer back, byte for byte.

A raw ASGI application: when the client leaves, before the first byte or after, the request upstream is
ended too.
"""

import asyncio
import contextlib
from typing import TYPE_CHECKING

import aiohttp
import msgspec
from litestar import post
from litestar.types import ASGIApp, Receive, Scope, Send

from eccon.launch.keys import client_key

if TYPE_CHECKING:
    from eccon.supervisor.cluster import Cluster

__all__ = ["prompt"]

BODY_MAX = 512 * 2**20
PASSED = ("content-type", "x-request-id", "retry-after")


@post("/v1/prompt", status_code=200, media_type="text/event-stream", sync_to_thread=False)
def prompt() -> ASGIApp:
    """A test prompt: the body is a chat-completion request, the answer is the proxy's."""
    return _prompt


async def _prompt(scope: Scope, receive: Receive, send: Send) -> None:
    body = await _body(receive)
    if body is None:
        return
    if len(body) > BODY_MAX:
        await _refuse(send, 413, f"a prompt may have {BODY_MAX} bytes")
        return
    cluster: Cluster = scope["litestar_app"].state["cluster"]
    headers = {"content-type": "application/json"}
    headers |= {k.decode(): v.decode("latin-1") for k, v in scope["headers"] if k == b"x-request-id"}
    if key := client_key(cluster.topology):
        headers["authorization"] = f"Bearer {key}"
    relay = asyncio.ensure_future(_relay(cluster.owners["proxy"].spec.url, body, headers, send))
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({relay, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (relay, gone):
            task.cancel()
        await asyncio.wait({relay, gone})
    if not relay.cancelled():
        relay.result()


async def _body(receive: Receive) -> bytes | None:
    """The whole body, cut soon after the limit; None when the client left."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        if len(body) <= BODY_MAX:
            body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _relay(url: str, body: bytes, headers: dict[str, str], send: Send) -> None:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    begun = False
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            # Our own child: its certificate names the host that clients know.
            session.post(url + "/v1/chat/completions", data=body, headers=headers, ssl=False) as response,
        ):
            passed = [(k.lower().encode(), v.encode("latin-1")) for k, v in response.headers.items()]
            kept = [(k, v) for k, v in passed if k.decode("latin-1") in PASSED]
            begun = True
            await send({"type": "http.response.start", "status": response.status, "headers": kept})
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
    except aiohttp.ClientError as e:
        if begun:
            # Ending without the last chunk tells the client that the answer is cut.
            raise
        with contextlib.suppress(OSError):
            await _refuse(send, 503, f"the proxy at {url} cannot be reached: {e}")


async def _refuse(send: Send, status: int, message: str) -> None:
    body = msgspec.json.encode({"error": {"message": message}})
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})

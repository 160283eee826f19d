"""A proxy that does what the vendor guide's does, written anew for comparison: its text is not ours to copy.

Image and audio parts of type `image_url`, `audio_url` and `input_audio` are sent to the encoders round-robin
over all requests, each alone and without a `uuid`; when all have answered 200 the request goes to a PD.
Nothing bounds how much is under way, nothing is tried again, and each connection serves one request.
"""

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from tests.fakes import CHAT

__all__ = ["guide_proxy"]

KINDS = frozenset({"image_url", "audio_url", "input_audio"})


class _Guide:
    def __init__(self, session: aiohttp.ClientSession, encoders: Sequence[str], pds: Sequence[str]) -> None:
        self._session = session
        self._turn = itertools.cycle(encoders)
        self._pds = pds

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Encode every item at once, then ask the PD."""
        body = json.loads(await request.read())
        statuses = await asyncio.gather(
            *(self._encode(next(self._turn), body["model"], item) for item in _items(body))
        )
        if bad := [status for status in statuses if status != 200]:
            return web.json_response({"detail": "Encoder request failed"}, status=bad[0])
        async with self._session.post(random.choice(self._pds) + CHAT, json=body) as answer:
            if answer.status >= 400:
                return web.Response(status=500, text="Internal Server Error")
            out = web.StreamResponse(headers={"content-type": answer.content_type})
            await out.prepare(request)
            async for data in answer.content.iter_any():
                await out.write(data)
            await out.write_eof()
            return out

    async def _encode(self, url: str, model: str, item: object) -> int:
        body = {"model": model, "messages": [{"role": "user", "content": [item]}], "max_tokens": 1}
        try:
            async with self._session.post(url + CHAT, json={**body, "stream": False}) as answer:
                await answer.read()
                return answer.status
        except aiohttp.ClientError:
            return 502


def _items(body: dict[str, Any]) -> list[object]:
    contents = [message.get("content") for message in body["messages"]]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if part.get("type") in KINDS]


@asynccontextmanager
async def guide_proxy(encoders: Sequence[str], pds: Sequence[str]) -> AsyncIterator[str]:
    """Run it in this process; its URL."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        app = web.Application(client_max_size=2**28)
        app.router.add_post(CHAT, _Guide(session, encoders, pds).chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

"""`--inline-media`: remote images are downloaded once, here, and go to both sides as data URLs.

Otherwise encoder and PD download each on its own. What may be fetched is bounded: time, size, type,
redirects (each checked anew), and no address of the own network unless allowed, whatever a name resolves
to: the addresses that were checked are those that are connected to.
"""

import asyncio
import base64
import ipaddress
import socket
from urllib.parse import urljoin, urlsplit

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from eccon_proxy.buffers import span
from eccon_proxy.errors import bad_request
from eccon_proxy.plan import Buffer, Item, Place, Plan
from eccon_proxy.settings import Settings

__all__ = ["Inliner"]

REDIRECTS = 5
KINDS = frozenset({"image_url", "input_image"})


class _Part(msgspec.Struct):
    image_url: msgspec.Raw = msgspec.Raw(b"")


class _Url(msgspec.Struct):
    url: msgspec.Raw = msgspec.Raw(b"")


class _RefusedError(Exception):
    """A download that may not or cannot be done; the text is for the client."""


class _Checked(AbstractResolver):
    """Resolves names, and only to addresses that may be fetched from."""

    def __init__(self, *, private: bool) -> None:
        self._private = private
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        allowed = [r for r in found if self._private or _public(r["host"])]
        if not allowed:
            raise OSError(None, "its address is not a public one")
        return allowed

    async def close(self) -> None:
        await self._resolver.close()


def _public(host: str) -> bool:
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_global and not address.is_multicast


class Inliner:
    """Downloads and replaces."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def inline(self, plan: Plan) -> bytes | None:
        """The body with data URLs instead of remote images; None when it has none."""
        found = {
            position: remote[0]
            for position, item in enumerate(plan.items)
            if (remote := _remote(plan, item, item.place)) is not None
        }
        if not found:
            return None
        tasks = [asyncio.ensure_future(self._fetch(plan.items[i], url)) for i, url in found.items()]
        try:
            data = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return _replaced(plan, dict(zip(found, data)))  # noqa: B905

    async def close(self) -> None:
        """End its connections."""
        if self._session is not None:
            await self._session.close()

    async def _fetch(self, item: Item, url: str) -> bytes:
        try:
            return await asyncio.wait_for(self._follow(url), self._settings.inline_timeout)
        except asyncio.TimeoutError:
            reason = f"no answer within {self._settings.inline_timeout:g} s"
        except (aiohttp.ClientError, _RefusedError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
        raise bad_request(f"{item.where}: the image could not be fetched: {reason}", param=item.where)

    async def _follow(self, url: str) -> bytes:
        for _ in range(REDIRECTS + 1):
            self._check(url)
            async with self._open().get(url, allow_redirects=False) as answer:
                if answer.status in {301, 302, 303, 307, 308}:
                    url = urljoin(url, answer.headers.get("location", ""))
                    continue
                if answer.status != 200:
                    raise _RefusedError(f"its server answers {answer.status}")
                if not answer.content_type.startswith("image/"):
                    raise _RefusedError(f"it is {answer.content_type[:64]}, no image")
                return _data_url(answer.content_type, await self._read(answer))
        raise _RefusedError("too many redirects")

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        limit = self._settings.inline_max_bytes
        data = bytearray()
        async for chunk in answer.content.iter_any():
            data += chunk
            if len(data) > limit:
                raise _RefusedError(f"it is longer than {limit} bytes")
        return bytes(data)

    def _check(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise _RefusedError("its address is no http URL")
        try:
            literal = ipaddress.ip_address(parts.hostname)
        except ValueError:
            return  # a name: its addresses are checked when it is resolved
        if not self._settings.inline_private and not _public(str(literal)):
            raise _RefusedError("its address is not a public one")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            resolver = _Checked(private=self._settings.inline_private)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=resolver, limit=0, use_dns_cache=False),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session


def _data_url(kind: str, data: bytes) -> bytes:
    return b'"data:%b;base64,%b"' % (kind.encode("ascii", "replace"), base64.b64encode(data))


def _remote(plan: Plan, item: Item, place: Place) -> tuple[str, int, int] | None:
    """Address of a remote image, and where it stands in the body as a JSON string."""
    if item.kind not in KINDS or not item.payload:
        return None
    view = memoryview(plan.body)[place.start : place.end]
    raw = msgspec.json.decode(view, type=_Part).image_url
    if bytes(memoryview(raw)[:1]) == b"{":
        raw = msgspec.json.decode(raw, type=_Url).url
    start, end = span(plan.body, raw)
    if end - start > 16384:  # a data URL; no address is that long
        return None
    try:
        url = msgspec.json.decode(raw, type=str)
    except msgspec.ValidationError:
        return None
    return (url, start, end) if url.lower().startswith(("http://", "https://")) else None


def _replaced(plan: Plan, data: dict[int, bytes]) -> bytes:
    """The body with the addresses of these items (by position) replaced, wherever they stand."""
    view = memoryview(plan.body)
    parts: list[Buffer] = []
    done = 0
    for place, position in plan.places:
        if position not in data:
            continue
        found = _remote(plan, plan.items[position], place)
        if found is not None:
            _, start, end = found
            parts += (view[done:start], data[position])
            done = end
    parts.append(view[done:])
    return b"".join(parts)

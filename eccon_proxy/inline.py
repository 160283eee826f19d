"""`--inline-media`: remote images are downloaded once, here, and go to both sides as data URLs.

Otherwise encoder and PD download each on its own. What may be fetched is bounded: time, size, type,
redirects (each checked anew), and no address of the own network unless allowed, whatever a name resolves
to: the addresses that were checked are those that are connected to.
"""

import asyncio
import base64
import ipaddress
import re
import socket

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from eccon_proxy.buffers import span
from eccon_proxy.errors import bad_request
from eccon_proxy.plan import Buffer, Item, Place, Plan
from eccon_proxy.settings import Settings

__all__ = ["Inliner"]

REDIRECTS = 5
KINDS = frozenset({"image_url", "input_image"})
_IMAGE_TYPE = re.compile(r"image/[a-z0-9][a-z0-9.+-]{0,63}")
"""What may stand in a data URL, and so in the body's JSON, as it is."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class _Part(msgspec.Struct):
    image_url: msgspec.Raw = msgspec.Raw(b"")


class _Url(msgspec.Struct):
    url: msgspec.Raw = msgspec.Raw(b"")


class _Timer:
    """The time that is left for a download, over all its redirects."""

    def __init__(self, limit: float) -> None:
        self._deadline = asyncio.get_running_loop().time() + limit

    def left(self) -> aiohttp.ClientTimeout:
        """As aiohttp takes it."""
        left = self._deadline - asyncio.get_running_loop().time()
        return aiohttp.ClientTimeout(total=max(0.001, left))


class _Budget:
    """Bytes of base64 that a body may still grow by, over all downloads of a request."""

    def __init__(self, left: int) -> None:
        self._left = left

    def spend(self, size: int) -> None:
        """Take what so many bytes become; raises when the body would be too long."""
        self._left -= size * 4 // 3
        if self._left < 0:
            raise _RefusedError("the request would be longer than the longest body")


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
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.is_site_local or address.teredo is not None or int(address) >> 32 == 0:
            return False
        if inner is not None:
            return inner.is_global and not inner.is_multicast
    return address.is_global and not address.is_multicast


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
        # One download for each address: parts may differ in their other keys.
        tasks: dict[str, asyncio.Task[bytes]] = {}
        budget = _Budget(self._settings.max_body - len(plan.body))
        for i, url in found.items():
            if url not in tasks:
                tasks[url] = asyncio.ensure_future(self._fetch(plan.items[i], url, budget))
        try:
            await asyncio.gather(*tasks.values())
            return _replaced(
                plan, {i: tasks[url].result() for i, url in found.items()}, self._settings.max_body
            )
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        """End its connections."""
        if self._session is not None:
            await self._session.close()

    async def _fetch(self, item: Item, url: str, budget: "_Budget") -> bytes:
        limit = self._settings.inline_timeout
        timer = _Timer(limit)
        try:
            return await self._follow(url, timer, budget)
        except asyncio.TimeoutError:
            reason = f"no answer within {limit:g} s"
        except (aiohttp.ClientError, _RefusedError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
        raise bad_request(f"{item.where}: the image could not be fetched: {reason}", param=item.where)

    async def _follow(self, address: str, timer: "_Timer", budget: "_Budget") -> bytes:
        url = URL(address)
        for _ in range(REDIRECTS + 1):
            self._check(url)
            # What is checked is what is asked for: both are the same parsed address.
            async with self._open().get(url, allow_redirects=False, timeout=timer.left()) as answer:
                if answer.status in {301, 302, 303, 307, 308}:
                    url = url.join(URL(answer.headers.get("location", "")))
                    continue
                if answer.status != 200:
                    raise _RefusedError(f"its server answers {answer.status}")
                kind = answer.content_type.lower()
                if not _IMAGE_TYPE.fullmatch(kind):
                    raise _RefusedError(f"it is {kind[:64]!r}, no image")
                if answer.headers.get("content-encoding", "identity").strip().lower() != "identity":
                    raise _RefusedError("its server sends it in a coding that was not asked for")
                return _data_url(kind, await self._read(answer, budget))
        raise _RefusedError("too many redirects")

    async def _read(self, answer: aiohttp.ClientResponse, budget: "_Budget") -> bytes:
        limit = self._settings.inline_max_bytes
        data = bytearray()
        async for chunk in answer.content.iter_any():
            data += chunk
            if len(data) > limit:
                raise _RefusedError(f"it is longer than {limit} bytes")
            budget.spend(len(chunk))
        return bytes(data)

    def _check(self, url: URL) -> None:
        if url.scheme not in {"http", "https"} or not url.host:
            raise _RefusedError("its address is no http URL")
        try:
            literal = ipaddress.ip_address(url.host.partition("%")[0])
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
                auto_decompress=False,  # a few bytes may hide gigabytes
                headers={"accept": "image/*", "accept-encoding": "identity"},
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


def _replaced(plan: Plan, data: dict[int, bytes], limit: int) -> bytes:
    """The body with the addresses of these items (by position) replaced, wherever they stand."""
    view = memoryview(plan.body)
    parts: list[Buffer] = []
    done = 0
    total = len(plan.body)
    for place, position in plan.places:
        if position not in data:
            continue
        found = _remote(plan, plan.items[position], place)
        if found is not None:
            _, start, end = found
            parts += (view[done:start], data[position])
            done = end
            total += len(data[position])
            if total > limit:  # one image may stand in many places
                raise bad_request(f"With its images in it the body is longer than {limit} bytes")
    parts.append(view[done:])
    return b"".join(parts)

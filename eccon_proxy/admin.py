"""The admin API: members, drains, traces, events, settings. On its own listener, never the public port."""

import asyncio
import hmac
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from litestar import Litestar, Request, Response, delete, get, post
from litestar.connection import ASGIConnection
from litestar.exceptions import (
    ClientException,
    HTTPException,
    NotAuthorizedException,
    NotFoundException,
    PermissionDeniedException,
)
from litestar.handlers import BaseRouteHandler
from litestar.response import Stream
from litestar.types import Guard

from eccon_proxy.app import on_error
from eccon_proxy.chrometrace import chrome_trace
from eccon_proxy.core import Core
from eccon_proxy.drain import Drains
from eccon_proxy.encoders import Encoder
from eccon_proxy.events import Event
from eccon_proxy.pd import PD
from eccon_proxy.schema import Trace
from eccon_proxy.settings import SettingsError, admin_address, masked, normal_url
from eccon_proxy.upstream import UpstreamError

__all__ = ["admin_app"]

PROFILE_TIMEOUT = 60.0
MAX_ID = 64
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})


class NewEncoder(msgspec.Struct):
    """Body of `POST /admin/encoders`."""

    url: str
    id: str | None = None
    pd: str | None = None
    """Its PD's URL; needed with several."""


class Restart(msgspec.Struct):
    """Body of `POST /admin/pds/expect-restart`."""

    url: str | None = None
    """The PD's URL; needed with several."""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 60.0
    """Within how long it will go away; 0: it will not after all."""


def admin_app(core: Core, drains: Drains) -> Litestar:
    """The application of the admin listener."""

    def find(encoder_id: str) -> Encoder:
        encoder = core.encoders.get(encoder_id)
        if encoder is None:
            raise NotFoundException(f"no encoder {encoder_id[:MAX_ID]!r}")
        return encoder

    @get("/admin/state")
    async def state() -> Response[bytes]:
        return _json(core.state())

    @get("/admin/settings")
    async def settings() -> Response[bytes]:
        return _json(masked(core.settings))

    @get("/admin/encoders")
    async def encoders() -> Response[bytes]:
        return _json({"encoders": [e.info() for e in core.encoders.values()]})

    @post("/admin/encoders")
    async def add(request: Request[Any, Any, Any]) -> Response[bytes]:
        try:
            new = msgspec.json.decode(await request.body(), type=NewEncoder)
        except msgspec.DecodeError as error:
            raise ClientException(
                f'a body like {{"url": "http://127.0.0.1:19101"}} is needed: {error}'
            ) from None
        return _json(_join(core, new).info(), 201)

    @get("/admin/pds")
    async def pds() -> Response[bytes]:
        return _json({"pds": [pd.info() for pd in core.pds]})

    @post("/admin/pds/expect-restart")
    async def expect_restart(request: Request[Any, Any, Any]) -> Response[bytes]:
        try:
            notice = msgspec.json.decode(await request.body() or b"{}", type=Restart)
        except msgspec.DecodeError as error:
            raise ClientException(f'a body like {{"seconds": 60}} is needed: {error}') from None
        pd = _pd(core, notice.url, "url")
        pd.expect_restart(notice.seconds)
        return _json(pd.info(), 200)

    @post("/admin/encoders/{encoder_id:str}/drain")
    async def drain(encoder_id: str, now: bool = False) -> Response[bytes]:
        encoder = find(encoder_id)
        drains.begin(encoder, now=now)
        return _json(encoder.info(), 200)

    @post("/admin/encoders/{encoder_id:str}/resume")
    async def resume(encoder_id: str) -> Response[bytes]:
        encoder = find(encoder_id)
        drains.resume(encoder)
        return _json(encoder.info(), 200)

    @delete("/admin/encoders/{encoder_id:str}", status_code=200)
    async def remove(encoder_id: str, now: bool = False, force: bool = False) -> Response[bytes]:
        encoder = find(encoder_id)
        others = [e for e in core.encoders.values() if e is not encoder and not drains.removes(e)]
        if not others and not force:
            raise HTTPException("the last encoder is removed only with ?force=true", status_code=409)
        info = encoder.info()
        await drains.remove(encoder, now=now)
        return _json(encoder.info() if encoder.id in core.encoders else info)

    @get("/admin/traces")
    async def traces(limit: int = 100, form: str = "json") -> Response[bytes]:
        found: list[Trace] = []
        for recorder in core.traces.newest():
            if len(found) >= max(0, limit):
                break
            found.append(recorder.snapshot())
        return _json(chrome_trace(found) if form == "chrome" else {"traces": found})

    @get("/admin/traces/{trace_id:str}")
    async def trace(trace_id: str, form: str = "json") -> Response[bytes]:
        recorder = core.traces.get(trace_id)
        if recorder is None:
            raise NotFoundException(f"no trace {trace_id[:128]!r}")
        found = recorder.snapshot()
        return _json(chrome_trace([found]) if form == "chrome" else found)

    @get("/admin/events")
    async def events(request: Request[Any, Any, Any]) -> Stream:
        return Stream(
            _events(core, request.headers.get("last-event-id")),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    @post("/start_profile")
    async def start_profile() -> Response[bytes]:
        return await _profile(core, b"/start_profile")

    @post("/stop_profile")
    async def stop_profile() -> Response[bytes]:
        return await _profile(core, b"/stop_profile")

    async def no_browser(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        # Any page that the operator looks at could send requests to a loopback port, or have a name of
        # its own resolve to it; neither comes without an Origin or with our address as Host.
        host = re.sub(r":\d+$", "", connection.headers.get("host", "")).lower()
        if connection.headers.get("origin") is not None or host not in LOOPBACK:
            raise PermissionDeniedException("without --admin-key only local programs are served, no browsers")

    async def guard(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        given = connection.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), core.settings.admin_key.encode()):
            raise NotAuthorizedException("the admin key is needed: Authorization: Bearer KEY")

    guards: list[Guard] = []
    if core.settings.admin_key:
        guards.append(guard)
    elif admin_address(core.settings) is not None:
        guards.append(no_browser)
    return Litestar(
        [
            state, settings, encoders, add, drain, resume, remove, pds, expect_restart,
            traces, trace, events, start_profile, stop_profile,
        ],
        openapi_config=None,
        logging_config=None,
        guards=guards,
        exception_handlers={Exception: on_error},
    )  # fmt: skip


def _json(value: object, status: int = 200) -> Response[bytes]:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _join(core: Core, new: NewEncoder) -> Encoder:
    try:
        url = normal_url(new.url)
    except SettingsError as error:
        raise HTTPException(str(error), status_code=422) from None
    if core.is_own(url):
        raise HTTPException(f"{url} is this proxy itself", status_code=422)
    if any(e.url == url for e in core.encoders.values()) or any(pd.url == url for pd in core.pds):
        raise HTTPException(f"{url} is a member already", status_code=409)
    if new.id is not None and (not new.id or len(new.id) > MAX_ID or not _plain(new.id)):
        message = f"an id is 1 to {MAX_ID} letters, digits, '-', '_' or '.'"
        raise HTTPException(message, status_code=422)
    encoder_id = new.id or core.free_id()
    if encoder_id in core.encoders:
        raise HTTPException(f"{encoder_id} is taken", status_code=409)
    return core.join(encoder_id, url, _pd(core, new.pd, "pd"))


def _plain(text: str) -> bool:
    return text.isascii() and text.replace("-", "").replace("_", "").replace(".", "").isalnum()


def _pd(core: Core, url: str | None, key: str) -> PD:
    if url is None:
        if len(core.pds) > 1:
            raise HTTPException(f'with several PDs say which one: "{key}": URL', status_code=422)
        return core.pds[0]
    try:
        normal = normal_url(url)
    except SettingsError as error:
        raise HTTPException(str(error), status_code=422) from None
    for pd in core.pds:
        if pd.url == normal:
            return pd
    raise HTTPException(f"{normal} is no PD of this proxy", status_code=422)


async def _events(core: Core, last_id: str | None) -> AsyncIterator[bytes]:
    after = int(last_id) if last_id is not None and last_id.isascii() and last_id.isdigit() else None
    if after is None or not core.feed.can_resume(after):
        state = core.state()
        after = state.seq
        yield Event(after, "state", state).render()
    async for chunk in core.feed.follow(after):
        yield chunk


async def _profile(core: Core, path: bytes) -> Response[bytes]:
    """Ask every server and merge what they say."""
    members = [(e.id, e.upstream) for e in core.encoders.values()] + [
        (pd.url, pd.upstream) for pd in core.pds
    ]
    key = core.settings.upstream_api_key.encode()
    headers = b"authorization: Bearer %b\r\n" % key if key else b""

    async def ask(name: str) -> int | str:
        upstream = dict(members)[name]
        try:
            response = await upstream.request(b"POST", path, headers, timeout=PROFILE_TIMEOUT, fresh=True)
        except UpstreamError as error:
            return str(error)
        response.close()
        return response.status

    names = [name for name, _ in members]
    answers = dict(zip(names, await asyncio.gather(*(ask(n) for n in names)), strict=True))
    return _json({"servers": answers}, 200 if all(a == 200 for a in answers.values()) else 502)

"""The other endpoints: to the PD as they are, but never with media, which no encoder would have seen."""

import json

import msgspec

from eccon_proxy.chat import enter, forward, refuse_when_full
from eccon_proxy.classify import carries_media, looks_clean
from eccon_proxy.errors import Failure, bad_request, busy, down, upstream
from eccon_proxy.exchange import Exchange
from eccon_proxy.headers import answer_headers
from eccon_proxy.pd import PD, Forward
from eccon_proxy.plan import BOM, check_utf8, fingerprint
from eccon_proxy.upstream import UpstreamError

__all__ = ["get", "post"]

ANSWER_LIMIT = 16 * 1024 * 1024
GET_TIMEOUT = 30.0
_INPUTS = (
    "messages", "input", "inputs", "previous_input_messages", "prompt", "prompt_embeds", "suffix", "query",
    "documents",
)  # fmt: skip
"""Members of any of these requests that vLLM reads content parts from."""
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Any number of digits is a number; which one does not matter here.
_any = json.JSONDecoder(parse_int=float)


async def post(ex: Exchange) -> None:
    """Forward one text request."""
    core = ex.core
    headers = ex.upstream_headers()
    ex.check_type()
    refuse_when_full(ex)
    body = await ex.read_body()
    refuse_media(body, ex.route)
    await enter(ex)
    try:
        pd = await core.pick_pd(media=False)
        mark = fingerprint(body)
        pd.refuse_poison(mark)
        await forward(ex, Forward(pd, mark, (), 0), headers, [body])
    finally:
        core.room.give()


def refuse_media(body: bytes | bytearray, route: str) -> None:
    """Raise a 400 when a body that is no chat request carries media.

    vLLM reads a body in any of JSON's encodings; what is not UTF-8 could hide media here, so it is refused.
    """
    try:
        check_utf8(body)
        members = _object.decode(memoryview(body)[3:] if body.startswith(BOM) else body)
        if looks_clean(body):
            return
        inputs = {
            name: _any.decode(str(memoryview(members[name]), "utf-8")) for name in _INPUTS if name in members
        }
    except RecursionError:
        raise bad_request("The body's JSON is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise bad_request(f"The body is not a JSON object: {error}") from None
    if inputs.get("prompt_embeds") is not None:
        raise bad_request(f"prompt_embeds cannot be served at {route}", param="prompt_embeds")
    for name, value in inputs.items():
        found = carries_media(value)
        if found is not None:
            raise bad_request(
                f"{name}: {found} cannot be served at {route}; send media to /v1/chat/completions", param=name
            )


async def get(ex: Exchange) -> None:
    """Answer from the first PD that answers."""
    core = ex.core
    headers = b"%bx-request-id: %b\r\n" % (ex.upstream_headers(), ex.trace.id.encode())
    ex.watch()
    last: Failure | None = None
    for pd in sorted(core.pds, key=lambda p: p.state != "ready"):
        try:
            await _get(ex, pd, headers)
        except UpstreamError as error:
            last = _failure(pd, error)
            continue
        return
    raise last or down("No PD", code="pd_down")


async def _get(ex: Exchange, pd: PD, headers: bytes) -> None:
    path = ex.path
    limit = min(GET_TIMEOUT, ex.core.settings.first_byte_timeout)
    for fresh in (False, True):
        try:
            response = await pd.upstream.request(b"GET", path, headers, timeout=limit, fresh=fresh)
        except UpstreamError as error:
            if error.stale:
                continue
            raise
        break
    try:
        body = await response.read_all(ANSWER_LIMIT)
    finally:
        response.close()
    if body is None:
        raise upstream("The PD's answer is too long")
    out, _ = answer_headers(response.headers, ex.trace.id.encode())
    await ex.answer(response.status, out, body)


def _failure(pd: PD, error: UpstreamError) -> Failure:
    if error.cause == "exhausted":
        return busy(f"The PD was not asked: {error}")
    if error.cause in {"refused", "connect"}:
        return down(f"The PD is down: {error}", code="pd_down")
    status = 504 if error.cause == "timeout" else 502
    return upstream(f"{pd.url} gave no answer: {error}", status=status)

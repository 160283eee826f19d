"""Which headers pass: end-to-end ones do, those of one hop and those the proxy sets itself do not."""

import hmac
import re
from collections.abc import Iterable

from eccon_proxy.errors import Failure
from eccon_proxy.settings import Settings

__all__ = ["Keys", "answer_headers", "request_headers", "trace_context"]

Header = tuple[bytes, bytes]
_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
    b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
_OURS = _HOP | {
    b"host", b"content-length", b"content-type", b"accept-encoding", b"expect", b"x-request-id",
    b"x-request-timeout", b"authorization", b"traceparent", b"tracestate",
}  # fmt: skip
_NOT_RELAYED = _HOP | {b"content-length", b"set-cookie", b"server", b"date", b"x-request-id"}
_IDS = rb"-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
# Version 00 has exactly these fields; later ones may have more.
_TRACEPARENT = re.compile(rb"00" + _IDS + rb"|(?!00|ff)[0-9a-f]{2}" + _IDS + rb"(?:-.*)?")
_SSE = (b"text/event-stream", (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class Keys:
    """Who may call, and what the servers behind are told."""

    def __init__(self, settings: Settings) -> None:
        self._keys = tuple(k.encode() for k in settings.api_keys)
        self._upstream = settings.upstream_api_key.encode()

    def check(self, authorization: bytes | None) -> bytes:
        """The authorization line for upstream; raises 401 when a key is asked for and this is none."""
        consumed = False
        if self._keys:
            scheme, _, given = (authorization or b"").partition(b" ")
            given = given.strip()
            # Every key is compared, so that the time tells nothing about which one was near.
            found = [hmac.compare_digest(given, key) for key in self._keys]
            if scheme.lower() != b"bearer" or not any(found):
                raise Failure(
                    401,
                    "A valid API key is needed: Authorization: Bearer KEY",
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers=((b"www-authenticate", b"Bearer"),),
                )
            consumed = True
        if authorization is not None and not consumed:
            return b"authorization: %b\r\n" % authorization
        return b"authorization: Bearer %b\r\n" % self._upstream if self._upstream else b""


def request_headers(headers: Iterable[Header], authorization: bytes, context: bytes = b"") -> bytes:
    """Lines for upstream, but for content type, request id and what the client of ours sets.

    `context` are the lines of a trace context of our own; without them the client's is passed on.
    """
    found = [authorization]
    named: frozenset[bytes] = frozenset()
    traceparent: bytes | None = None
    tracestate: list[bytes] = []
    for name, value in headers:
        if name not in _OURS:
            found.append(b"%b: %b\r\n" % (name, value))
        elif name == b"connection":
            named = frozenset(v.strip().lower() for v in value.split(b","))
        elif name == b"traceparent":
            traceparent = value if traceparent is None else b""  # of two, neither can be trusted
        elif name == b"tracestate":
            tracestate.append(value)
    if len(named) > (b"keep-alive" in named) + (b"close" in named):
        found = [line for line in found if line.partition(b":")[0] not in named]
    if context:
        found.append(context)
    elif traceparent is not None and _TRACEPARENT.fullmatch(traceparent):
        found.append(b"traceparent: %b\r\n" % traceparent)
        if tracestate:
            found.append(b"tracestate: %b\r\n" % b",".join(tracestate))
    return b"".join(found)


def trace_context(headers: Iterable[Header]) -> dict[str, str]:
    """The client's `traceparent` and `tracestate`; empty when it brought no valid one."""
    parents = [v for n, v in headers if n == b"traceparent"]
    if len(parents) != 1 or not _TRACEPARENT.fullmatch(parents[0]):
        return {}
    state = b",".join(v for n, v in headers if n == b"tracestate")
    return {"traceparent": parents[0].decode()} | ({"tracestate": state.decode("latin-1")} if state else {})


def answer_headers(headers: list[Header], request_id: bytes) -> tuple[list[Header], bool]:
    """The headers of our answer, and whether it is an event stream."""
    out = [h for h in headers if h[0] not in _NOT_RELAYED]
    kind = next((v for n, v in headers if n == b"content-type"), b"")
    stream = kind.lower().startswith(_SSE[0])
    if stream:
        out = [h for h in out if h[0] not in {b"cache-control", b"x-accel-buffering"}]
        out += _SSE[1:]
    named = next((v for n, v in headers if n == b"connection"), b"")
    if named and named.lower() not in {b"keep-alive", b"close"}:
        hop = {v.strip().lower() for v in named.split(b",")}
        out = [h for h in out if h[0] not in hop]
    out.append((b"x-request-id", request_id))
    return out, stream

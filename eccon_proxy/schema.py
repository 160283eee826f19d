"""What the admin API says: typed structs shared by the proxy and its clients.

Imports only msgspec, so that a client pays nothing for it. Times are seconds; `*_at` are Unix
times; everything in a `Span` counts from its trace's `started_at`.
"""

from typing import Literal

import msgspec

__all__ = ["ON_TRIAL", "EncoderInfo", "Outcome", "PDInfo", "ProxyState", "Span", "SpanKind", "Trace"]

EncoderState = Literal["probing", "ready", "ejected", "draining", "drained", "down"]
Outcome = Literal["", "ok", "client_error", "busy", "upstream_error", "client_closed"]
SpanKind = Literal["queue", "encode", "gate", "pd", "stream", "push", "wait", "pull"]


ON_TRIAL = "on trial"
"""The reason of a member that is back for one item, which decides."""


class EncoderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One member of the encoder pool."""

    id: str
    url: str
    state: EncoderState
    reason: str = ""
    """Why it is in this state, for a person; empty when ready."""
    since: float = 0.0
    inflight: int = 0
    """Items being encoded there now."""
    staged: int = 0
    """Items encoded there and not yet consumed by the PD."""
    items: int = 0
    """Items encoded with success since the proxy started (its fan-out count)."""
    errors: int = 0
    oldest_inflight_s: float = 0.0
    encode_ms_p50: float | None = None
    encode_ms_p99: float | None = None


class PDInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One PD behind the proxy."""

    url: str
    state: Literal["probing", "ready", "down", "stalled"]
    reason: str = ""
    since: float = 0.0
    epoch: float | None = None
    """`process_start_time_seconds` of its present life; None while unknown."""
    inflight: int = 0


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stretch of a request's way. `push`, `wait`, `pull` come from connector events, not the proxy."""

    kind: SpanKind
    start: float
    end: float | None = None
    """None while it lasts."""
    item: int | None = None
    """Index of the media part in the request, in order of appearance; the first of identical ones."""
    attempt: int = 0
    encoder: str = ""
    uuid: str = ""
    """The identity sent to encoder and PD: the connector's `mm_hash`."""
    outcome: Literal["ok", "error", "timeout", "cancelled"] = "ok"
    error: str = ""


class Trace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request's way through the cluster."""

    id: str
    started_at: float
    route: str = "/v1/chat/completions"
    model: str = ""
    status: int = 0
    """HTTP status sent to the client; 0 while in flight; 499 when the client left."""
    outcome: Outcome = ""
    stream: bool = False
    items: int = 0
    """Media parts in the request, identical ones counted each."""
    spans: tuple[Span, ...] = ()
    ttft_s: float | None = None
    total_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str = ""


class ProxyState(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /admin/state`."""

    version: str
    started_at: float
    draining: bool
    encoders: tuple[EncoderInfo, ...]
    pds: tuple[PDInfo, ...]
    requests: int
    """Requests taken since the start, on all routes that reach an upstream."""
    inflight: int
    queued: int = 0
    seq: int = 0
    """Sequence number of the newest event of `GET /admin/events`."""

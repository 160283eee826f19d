"""What a vLLM server says of itself: its start time and counters in `/metrics`, its models."""

import re
from typing import Any

import msgspec

__all__ = ["Vitals", "canary_body", "first_model", "read_vitals"]

_EPOCH = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)
_MOVING = re.compile(
    rb"^vllm:(?:prompt_tokens_total|generation_tokens_total|num_requests_running|num_requests_waiting"
    rb"|request_success_total)(?:\{[^}]*\})?\s+\S+",
    re.MULTILINE,
)


class Vitals(msgspec.Struct, frozen=True):
    """One look at `/metrics`. Two that differ but for the epoch mean that the engine moved."""

    epoch: float | None
    """`process_start_time_seconds` of the API server."""
    counters: tuple[bytes, ...]
    """Lines of tokens and requests; they stand still when the engine does."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


def read_vitals(exposition: bytes) -> Vitals:
    """Read Prometheus' text format."""
    epoch = _EPOCH.search(exposition)
    try:
        start = float(epoch.group(1)) if epoch else None
    except ValueError:
        start = None
    return Vitals(start, tuple(_MOVING.findall(exposition)))


def first_model(body: bytes) -> str | None:
    """The first id of `/v1/models`."""
    try:
        models = msgspec.json.decode(body, type=_Models)
    except msgspec.DecodeError:
        return None
    return models.data[0].id if models.data else None


def canary_body(model: str) -> bytes:
    """A text request of one token: what the proxy asks on its own account."""
    request: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "."}],
        "max_tokens": 1,
        "stream": False,
    }
    return msgspec.json.encode(request)

"""What a vLLM server says of itself: its start time and counters in `/metrics`, its models."""

import re
from typing import Any

import msgspec

__all__ = ["Vitals", "canary_body", "encoded", "first_model", "read_vitals", "trial_body"]

GREY = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAADgAAAA4CAAAAACN7WTCAAAAJElEQVR42u3LMQ0AAAwD"
    "oEqv9FpYdsNP+hRRFEVRFEVRFMWbAclXIFtsqkldAAAAAElFTkSuQmCC"
)
"""56 × 56 pixels."""
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


class _Answer(msgspec.Struct):
    choices: list[msgspec.Raw]


_answer = msgspec.json.Decoder(_Answer)


def encoded(body: bytes | None) -> bool:
    """Whether the body of a 200 says that something ran: JSON with choices."""
    try:
        return bool(_answer.decode(body or b"").choices)
    except msgspec.DecodeError:
        return False


def trial_body(model: str, uuid: str) -> bytes:
    """A request to encode a small grey image: what an ejected encoder is tried with."""
    part = {"type": "image_url", "image_url": {"url": GREY}, "uuid": uuid}
    return msgspec.json.encode(
        {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}
    )


def canary_body(model: str) -> bytes:
    """A text request of one token: what the proxy asks on its own account."""
    request: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "."}],
        "max_tokens": 1,
        "stream": False,
    }
    return msgspec.json.encode(request)

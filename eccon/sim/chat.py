"""The body of a chat completion request: read and checked as vLLM 0.30 does, with its answers to bad ones."""

import json
import math
from typing import Any

import msgspec

from eccon.connector.eccon_guard.settings import request_wait
from eccon.sim.errors import ApiError, bad_request, invalid, not_found
from eccon.sim.flags import Serve
from eccon.sim.parts import Media, read_part

__all__ = ["Chat", "UnparsableError", "loads", "read"]

_TRUE = {"1", "true", "t", "yes", "y", "on"}
_FALSE = {"0", "false", "f", "no", "n", "off"}
_ROLES_WITHOUT_CONTENT = {"assistant"}


class UnparsableError(Exception):
    """Neither JSON nor anything that a JSON parser can refuse; FastAPI has an answer of its own for it."""


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """A request that may run."""

    model: str
    media: tuple[Media, ...]
    text_tokens: int
    last_text: str
    max_tokens: int | None
    min_tokens: int
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    top_logprobs: int | None
    """None: no log-probabilities were asked for."""
    mm_processor_kwargs: dict[str, Any] | None
    media_io_kwargs: dict[str, Any] | None
    guard_wait_s: float | None
    """How long a guarded engine lets it wait for its items."""


def loads(body: bytes) -> Any:
    """The body's JSON, as Python reads it: NaN, a byte order mark and duplicate keys pass.

    Raises:
        ApiError: it is empty, or not JSON.
        UnparsableError: it is not text, or nested too deep.
    """
    if not body:
        raise invalid("missing", "body", "Field required", "None")
    try:
        return json.loads(body)
    except json.JSONDecodeError as e:
        ctx = {"error": e.msg}
        raise invalid(
            "json_invalid", f"body.{e.pos}", "JSON decode error", "<dict of 0 items>", ctx=ctx
        ) from e
    except (UnicodeDecodeError, RecursionError) as e:
        raise UnparsableError from e


def _shown(value: object) -> str:
    return f"<{type(value).__name__} of {len(value)} items>" if isinstance(value, dict | list) else str(value)


def _bool(body: dict[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    text = str(value).lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    msg = "Input should be a valid boolean, unable to interpret input"
    raise invalid("bool_parsing", f"body.{key}", msg, str(value))


def _int(body: dict[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, list | dict) or not math.isfinite(number):
        msg = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid("int_parsing", f"body.{key}", msg, _shown(value))
    if number != int(number):
        msg = "Input should be a valid integer, got a number with a fractional part"
        raise invalid("int_from_float", f"body.{key}", msg, str(value))
    return int(number)


def _dict(body: dict[str, Any], key: str) -> dict[str, Any] | None:
    value = body.get(key)
    if value is None or isinstance(value, dict):
        return value
    raise invalid("dict_type", f"body.{key}", "Input should be a valid dictionary", _shown(value))


def _sampling(body: dict[str, Any]) -> None:
    temperature = body.get("temperature")
    if temperature is None:
        return
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        msg = "Input should be a valid number, unable to parse string as a number"
        raise invalid("float_parsing", "body.temperature", msg, _shown(temperature))
    value = float(temperature)
    if not math.isfinite(value):
        problem = f"temperature must be a finite number, got {value}."
    elif value < 0:
        problem = f"temperature must be non-negative, got {value}."
    else:
        return
    raise bad_request(f"{problem} (parameter=temperature, value={value})", "temperature")


def _messages(serve: Serve, messages: list[Any]) -> tuple[list[Media], int, str]:
    media: list[Media] = []
    size, last = 8, ""
    for i, message in enumerate(messages):
        where = f"body.messages.{i}"
        if not isinstance(message, dict):
            raise invalid("dict_type", where, "Input should be a valid dictionary", _shown(message))
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise invalid("missing", f"{where}.role", "Field required", _shown(message))
        if content is None and role not in _ROLES_WITHOUT_CONTENT:
            raise invalid("string_type", f"{where}.content", "Input should be a valid string", "None")
        if not isinstance(content, str | list | None):
            raise invalid(
                "string_type", f"{where}.content", "Input should be a valid string", _shown(content)
            )
        parts = content if isinstance(content, list) else []
        found = [content] if isinstance(content, str) else [read_part(serve, p) for p in parts]
        texts = [f for f in found if isinstance(f, str)]
        media += [f for f in found if isinstance(f, Media)]
        size += 4 + sum(len(t) // 4 + 1 for t in texts)
        if texts and role == "user":
            last = texts[-1]
    return media, size, last


def _limits(serve: Serve, media: list[Media]) -> None:
    limits = {"image": 999, "video": 999} | serve.limit_mm | {"audio": 0}
    for modality in ("image", "video", "audio"):
        limit = limits[modality]
        if sum(m.modality == modality for m in media) > limit:
            msg = f"At most {limit} {modality}(s) may be provided in one prompt. (parameter={modality})"
            raise bad_request(msg, modality)


def _most(body: dict[str, Any], serve: Serve, max_model_len: int) -> int | None:
    key = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    value = _int(body, key)
    if value is None:
        return None
    if value < 1:
        msg = f"max_tokens must be at least 1, got {value}. (parameter=max_tokens, value={value})"
        raise bad_request(msg, "max_tokens")
    if value > max_model_len and serve.role != "producer":
        msg = (
            f"max_tokens={value} cannot be greater than max_model_len=max_total_tokens={max_model_len}. "
            f"Please request fewer output tokens. (parameter=max_tokens, value={value})"
        )
        raise bad_request(msg, "max_tokens")
    return value


def _options(serve: Serve, raw: dict[str, Any], key: str) -> dict[str, Any] | None:
    options = _dict(raw, key)
    if options and not serve.trusts_requests:
        msg = f"Per-request {key} are disabled by default: see --trust-request-mm-kwargs. (parameter={key})"
        raise bad_request(msg, key)
    return options


def read(serve: Serve, max_model_len: int, raw: Any) -> Chat:
    """Check the body.

    Raises:
        ApiError: vLLM would refuse it.
    """
    if not isinstance(raw, dict):
        if raw is None:
            raise invalid("missing", "body", "Field required", "None")
        msg = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", msg, _shown(raw))
    if "messages" not in raw:
        raise invalid("missing", "body.messages", "Field required", _shown(raw))
    messages = raw["messages"]
    if messages is None:
        msg = "'NoneType' object is not iterable"
        raise bad_request(msg)
    if not isinstance(messages, list):
        raise invalid("list_type", "body.messages", "Input should be a valid list", _shown(messages))
    stream = _bool(raw, "stream")
    options = _dict(raw, "stream_options")
    if options is not None and not stream:
        msg = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise bad_request(msg, "stream_options")
    _sampling(raw)
    n = _int(raw, "n")
    if n is not None and n < 1:
        msg = f"n must be at least 1, got {n}."
        raise bad_request(msg)
    processor, io = _options(serve, raw, "mm_processor_kwargs"), _options(serve, raw, "media_io_kwargs")
    media, text_tokens, last = _messages(serve, messages)
    model = raw.get("model")
    if model and model not in serve.served_names:
        raise not_found(f"The model `{model}` does not exist.", "model")
    if not messages:
        msg = "Cannot apply chat template to an empty conversation. Provide at least one message."
        raise bad_request(msg)
    _limits(serve, media)
    most = _most(raw, serve, max_model_len)
    if text_tokens + (most or 1) > max_model_len:
        raise too_long(max_model_len, text_tokens, most or 1)
    return Chat(
        model=model or serve.served_names[0],
        media=tuple(media),
        text_tokens=text_tokens,
        last_text=last[-300:],
        max_tokens=most,
        min_tokens=(most or 0) if _bool(raw, "ignore_eos") else _int(raw, "min_tokens") or 0,
        guard_wait_s=request_wait(raw.get("ec_transfer_params"), None),
        n=n or 1,
        stream=stream,
        include_usage=bool(options and options.get("include_usage")),
        continuous_usage=bool(options and options.get("continuous_usage_stats")),
        top_logprobs=(_int(raw, "top_logprobs") or 0) if _bool(raw, "logprobs") else None,
        mm_processor_kwargs=processor,
        media_io_kwargs=io,
    )


def too_long(max_model_len: int, prompt: int, wanted: int) -> ApiError:
    """400 of a prompt that leaves no room for its answer."""
    least = max_model_len - wanted + 1
    return bad_request(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {wanted} "
        f"output tokens and your prompt contains at least {min(prompt, least)} input tokens, for a total of "
        f"at least {min(prompt, least) + wanted} tokens. Please reduce the length of the input prompt or the "
        f"number of requested output tokens. (parameter=input_tokens, value={min(prompt, least)})",
        "input_tokens",
    )

"""Which parts of a chat message vLLM reads as media, however they are spelled.

The rules are those of vLLM 0.30 to 0.32. Without a `uuid` a part is read by its `type`; with one, or
without a type, by the first media key it has. The proxy adds a uuid, so a part that the two readings
see differently is refused.
"""

import json
import re
from typing import Any

import msgspec

from eccon_proxy.errors import bad_request

__all__ = ["MEDIA_KEYS", "PAYLOAD_OF", "TEXT_TYPES", "Part", "carries_media", "kind_of", "looks_clean"]

Raw = msgspec.Raw

PAYLOAD_OF = {
    "image_url": "image_url",
    "input_image": "image_url",
    "image_embeds": "image_embeds",
    "audio_url": "audio_url",
    "input_audio": "input_audio",
    "audio_embeds": "audio_embeds",
    "video_url": "video_url",
    "video_embeds": "video_embeds",
    "prompt_embeds": "prompt_embeds",
}
"""Kind of a media part, by its `type`, and the key that holds its payload."""

MEDIA_KEYS = (
    "image_url", "image_pil", "image_embeds", "audio_url", "input_audio", "audio_embeds",
    "video_url", "video_embeds", "prompt_embeds", "input_image",
)  # fmt: skip
TEXT_TYPES = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})

ABSENT = Raw(b"")


class Part(msgspec.Struct, gc=False):
    """One content part that is an object; what is not there is `ABSENT`, the last of doubled keys counts."""

    type: Any = None
    uuid: Raw = ABSENT
    image_url: Raw = ABSENT
    image_pil: Raw = ABSENT
    image_embeds: Raw = ABSENT
    audio_url: Raw = ABSENT
    input_audio: Raw = ABSENT
    audio_embeds: Raw = ABSENT
    video_url: Raw = ABSENT
    video_embeds: Raw = ABSENT
    prompt_embeds: Raw = ABSENT
    data: Raw = ABSENT
    input_image: Raw = ABSENT


class _Payload(msgspec.Struct, gc=False):
    url: Raw = ABSENT
    data: Raw = ABSENT


_part = msgspec.json.Decoder(Part)
_payload = msgspec.json.Decoder(_Payload)
# As a float a number may have any number of digits; whether it is zero is all that is asked.
_any = json.JSONDecoder(parse_int=float)


def kind_of(raw: Raw | bytes | memoryview, where: str) -> tuple[str, Part] | None:
    """The media kind of an object part and the part, None when vLLM reads no media in it.

    Raises a 400 naming `where` when the reading depends on a uuid.
    """
    part = _part.decode(raw)
    keys = [key for key in MEDIA_KEYS if getattr(part, key) is not ABSENT]
    kind = part.type
    has_uuid = part.uuid is not ABSENT and not _is_null(part.uuid)
    if not isinstance(kind, str):
        if not keys:
            if has_uuid and kind is None:
                raise bad_request(f"{where}: a part with a uuid and nothing else names no media", param=where)
            return None
        if kind is not None:
            raise bad_request(f"{where}.type: not a string", param=where)
        kind = keys[0]
    elif kind == "image_pil":
        raise bad_request(f"{where}: image_pil cannot be sent as JSON", param=where)
    elif kind not in PAYLOAD_OF:
        if not keys or (not has_uuid and all(_is_null(getattr(part, key)) for key in keys)):
            return None
        raise bad_request(f"{where}: a part of type {kind[:64]!r} must not carry {keys[0]}", param=where)
    if len(keys) > 1:
        raise bad_request(f"{where}: a part with several media keys ({', '.join(keys)})", param=where)
    if kind not in PAYLOAD_OF or (keys and keys[0] != PAYLOAD_OF[kind]):
        raise bad_request(f"{where}: {keys[0]} in a part of type {kind}", param=where)
    return kind, part


def has_payload(kind: str, part: Part) -> bool:
    """Whether a media part carries its bytes or address, so that no cache is asked for them."""
    raw: Raw = getattr(part, PAYLOAD_OF[kind])
    if kind == "prompt_embeds" and part.data is not ABSENT:
        raw = part.data
    if raw is ABSENT:
        return False
    view = memoryview(raw)
    if view[0] == 0x7B and PAYLOAD_OF[kind].endswith(("_url", "_audio")):
        inner = _payload.decode(raw)
        field = inner.data if kind == "input_audio" else inner.url
        return field is not ABSENT and _truthy(field)
    return _truthy(raw)


def _is_null(raw: Raw) -> bool:
    return bytes(raw) == b"null" if len(memoryview(raw)) == 4 else False


def _truthy(raw: Raw) -> bool:
    view = memoryview(raw)
    # Only short values can be empty or zero; long ones may be padded inside with white space.
    if len(view) > 64 and view[0] not in b"[{-0":
        return True
    return bool(_any.decode(str(view, "utf-8")))


_HINT = re.compile(
    rb"\\u00|image|audio|video|_embeds",
)


def looks_clean(body: bytes | bytearray) -> bool:
    """True when no media can be in a body, by a look at its bytes alone."""
    return _HINT.search(body) is None


def carries_media(value: Any) -> str | None:
    """The first media key or type in plain JSON, at any depth; None when there is none."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            kind = node.get("type")
            if isinstance(kind, str) and kind in PAYLOAD_OF:
                return kind
            # With a uuid even a null payload is media: "use what you have cached under it".
            named = node.get("uuid") is not None
            for key in MEDIA_KEYS:
                if node.get(key) is not None or (named and key in node):
                    return key
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    return None

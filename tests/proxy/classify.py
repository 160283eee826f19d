"""What vLLM's chat parser sees as media, written apart from the proxy: the tests' second opinion."""

import json
from dataclasses import dataclass
from typing import Any

__all__ = ["ENCODED_KINDS", "MEDIA", "Media", "canonical", "media_parts", "parts_of"]

# In the order in which vLLM 0.30-0.32 looks for them in a part that has a uuid or no type.
_IMAGE_KEYS = ("image_url", "image_embeds", "audio_embeds", "audio_url", "input_audio", "video_url")
MEDIA = frozenset({*_IMAGE_KEYS, "input_image", "video_embeds", "prompt_embeds"})
ENCODED_KINDS = frozenset({"image_url", "input_image", "audio_url", "input_audio"})
"""What the proxy encodes unless told otherwise: kinds of image and audio with a payload to decode."""


@dataclass(frozen=True)
class Media:
    """One media part of a conversation."""

    message: int
    index: int
    kinds: tuple[str, ...]
    """Every kind that it may be read as; more than one makes it ambiguous."""
    part: dict[str, Any]


def canonical(part: dict[str, Any]) -> str:
    """A part's content without its identity, comparable whatever its spelling."""
    return json.dumps({key: value for key, value in part.items() if key != "uuid"}, sort_keys=True)


def parts_of(body: Any) -> list[tuple[int, int, dict[str, Any]]]:
    """Every object in a content list: message, index, part."""
    found: list[tuple[int, int, dict[str, Any]]] = []
    messages = body.get("messages") if isinstance(body, dict) else None
    for at, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for index, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, dict):
                found.append((at, index, part))
    return found


def media_parts(body: Any) -> list[Media]:
    """Every part that vLLM may read as media: by its type, or by its key without type or with a uuid."""
    found = []
    for at, index, part in parts_of(body):
        kind = part.get("type")
        kinds = [key for key in part if key in MEDIA]
        by_type = isinstance(kind, str) and kind not in MEDIA and part.get("uuid") is None
        if by_type and all(part[key] is None for key in kinds):
            continue  # a text whose client writes out what it does not use
        if isinstance(kind, str) and kind in MEDIA and kind not in kinds:
            # An `input_image` part carries its payload under `image_url`.
            others = [key for key in kinds if key != "image_url"] if kind == "input_image" else []
            kinds = [kind, *others]
        if kinds:
            found.append(Media(at, index, tuple(kinds), part))
    return found

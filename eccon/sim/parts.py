"""Content parts of a chat message: which are text, which are media, and what vLLM 0.30 says to the rest.

Taken from answers of vLLM 0.30. Its messages for a part that fits no schema are pydantic's, many lines long;
here they are short, with the same status and type.
"""

from typing import Any

import msgspec

from eccon.sim.errors import ApiError, bad_request
from eccon.sim.flags import Serve

__all__ = ["Media", "read_part"]

_TEXT_KEYS = {"text": "text", "refusal": "refusal", "thinking": "thinking", "tool_reference": "name"}
_EMBEDS = {"image_embeds": "image", "audio_embeds": "audio", "video_embeds": "video"}
_AUDIO = {"audio_url", "input_audio"}
_DETAIL = {"auto", "low", "high"}


class Media(msgspec.Struct, frozen=True):
    """One media item as the client gave it. `url` is None where its uuid alone must do."""

    modality: str
    url: str | None
    uuid: str | None
    embeds: bool = False


def _unfit(part: object) -> ApiError:
    shown = repr(part) if len(repr(part)) < 90 else repr(part)[:60] + "..." + repr(part)[-25:]
    kind = type(part).__name__
    return bad_request(
        "1 validation error for ValidatorIterator\n0.ChatCompletionContentPartParam\n"
        f"  Input should be a content part that is known [input_value={shown}, input_type={kind}]"
    )


def _url_of(part: dict[str, Any], key: str) -> str:
    """Of `{"type": "image_url", "image_url": {"url": …}}` and its kin."""
    value = part.get(key)
    if not isinstance(value, dict):
        what = "None" if value is None else type(value).__name__
        msg = f"1 validation error for ChatCompletionContentPartParam\n{key}\n  Input should be a dictionary"
        raise bad_request(f"{msg} [type=dict_type, input_type={what}]")
    url = value.get("url")
    if not isinstance(url, str) or value.get("detail", "auto") not in _DETAIL:
        raise _unfit(part)
    return url


def _media(modality: str, url: str | None, uuid: str | None, *, embeds: bool = False) -> Media:
    if not url and uuid is None:
        msg = f"multi_modal_data['{modality}'][0] is empty but multi_modal_uuids['{modality}'][0] is missing."
        raise bad_request(msg)
    return Media(modality, url or None, uuid, embeds)


def _embeds(serve: Serve, part: dict[str, Any], key: str, uuid: str | None) -> Media:
    # A PD takes embeddings that somebody else computed "by definition"; nobody else does unless told to.
    if serve.role != "consumer" or _EMBEDS[key] == "audio":
        msg = f"You must set `--enable-mm-embeds` to input `{key}` (parameter={key})"
        raise bad_request(msg, key)
    if part.get(key) is not None or uuid is None:
        msg = f"Failed to load embeddings of `{key}`"
        raise bad_request(msg)
    return _media(_EMBEDS[key], None, uuid, embeds=True)


def read_part(serve: Serve, part: object) -> str | Media:
    """The part's text, or the media item it is.

    Raises:
        ApiError: vLLM 0.30 refuses such a part.
    """
    if not isinstance(part, dict):
        raise _unfit(part)
    kind = part.get("type")
    if kind is not None and not isinstance(kind, str):
        raise _unfit(part)
    uuid = None if part.get("uuid") is None else str(part["uuid"])
    if kind is None or uuid is not None:
        found = _by_key(serve, part, uuid, typed=kind is not None)
        if found is not None:
            return found
        if kind in {"image_url", "video_url", "input_image", *_AUDIO, *_EMBEDS}:
            msg = "Missing 'type' field in multimodal part. (parameter=type)"
            raise bad_request(msg, "type")
    if kind in _TEXT_KEYS:
        text = part.get(_TEXT_KEYS[kind])
        if not isinstance(text, str):
            raise _unfit(part)
        return text
    if kind in {"image_url", "video_url"}:
        if kind not in part:
            raise _unfit(part)
        return _media(kind.partition("_")[0], _url_of(part, kind), uuid)
    if kind == "input_image":
        if part.get("detail") not in _DETAIL or not isinstance(part.get("image_url"), str):
            msg = "1 validation error for ResponseInputImageParam\ndetail\n  Field required [type=missing]"
            raise bad_request(msg)
        return _media("image", part["image_url"], uuid)
    if kind in _AUDIO:
        return Media("audio", "", uuid)
    if kind in _EMBEDS:
        return _embeds(serve, part, kind, uuid)
    raise _unfit(part)


def _by_key(serve: Serve, part: dict[str, Any], uuid: str | None, *, typed: bool) -> Media | str | None:
    """Without a type, or with a uuid, the keys that are there decide."""
    for key, modality in (("image_url", "image"), ("video_url", "video")):
        if key in part:
            url = part[key]
            if isinstance(url, dict) and (typed or uuid is not None):
                url = _url_of(part, key)
            if url is not None and not isinstance(url, str):
                raise _unfit(part)
            if url is None and uuid is None:
                raise _unfit(part)
            return _media(modality, url, uuid)
    for key in _EMBEDS:
        if key in part:
            return _embeds(serve, part, key, uuid)
    if any(key in part for key in _AUDIO):
        return Media("audio", "", uuid)
    if not typed and isinstance(part.get("text"), str):
        return str(part["text"])
    if not typed:
        raise _unfit(part)
    return None

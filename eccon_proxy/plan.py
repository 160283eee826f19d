"""A chat request's bytes → what to encode and what to forward. Pure: no I/O, no clock.

The body is scanned once. Parts are slices of it; base64 is never copied. The body for the PD is the
client's own bytes with a `uuid` as the last key of each media part, and nothing else changed.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from eccon_proxy.buffers import span
from eccon_proxy.classify import ABSENT, Part, has_payload, kind_of
from eccon_proxy.errors import bad_request
from eccon_proxy.place import Place, without_uuid

__all__ = [
    "Buffer",
    "Item",
    "Place",
    "Plan",
    "check_utf8",
    "content_uuid",
    "encoder_body",
    "fingerprint",
    "is_fetched",
    "parse",
    "pd_body",
]

Buffer = bytes | bytearray | memoryview
Raw = msgspec.Raw
BOM = b"\xef\xbb\xbf"
PARTS = 10_000
"""Content parts in one request: a context has fewer tokens than that, and each costs time to look at."""
FIRST_BYTES = 256
"""In which the URL of an ordinary part begins."""
UTF8_STEP = 256 * 1024
"""Bytes that are checked at a time: as a string, a body may be four times its size."""


class _Message(msgspec.Struct, gc=False):
    content: str | list[Raw] | None = None


class _Chat(msgspec.Struct, gc=False):
    """What the proxy reads of a chat request; the last of doubled keys counts, as in vLLM."""

    messages: list[_Message] | None = None
    model: Raw = ABSENT
    stream: Any = None
    mm_processor_kwargs: Raw = ABSENT
    media_io_kwargs: Raw = ABSENT
    priority: Raw = ABSENT


class _LooseMessage(msgspec.Struct, gc=False):
    content: Raw = Raw(b"null")


class _LooseChat(msgspec.Struct, gc=False):
    """`_Chat` before any type is looked at: a doubled key may have stood for anything before."""

    messages: Raw = Raw(b"null")
    model: Raw = ABSENT
    stream: Any = None
    mm_processor_kwargs: Raw = ABSENT
    media_io_kwargs: Raw = ABSENT
    priority: Raw = ABSENT


_chat = msgspec.json.Decoder(_Chat)
_loose_chat = msgspec.json.Decoder(_LooseChat)
_loose_messages = msgspec.json.Decoder(list[_LooseMessage] | None)
_content = msgspec.json.Decoder(str | list[Raw] | None)

# The spelling of nearly every client: one part, no more keys. What does not match is decoded.
_IMAGE = re.compile(rb'\{\s*"type"\s*:\s*"image_url"\s*,\s*"image_url"\s*:\s*\{\s*"url"\s*:\s*"')
_IMAGE_END = re.compile(rb'"\s*(?:,\s*"detail"\s*:\s*"[a-z]+"\s*)?\}\s*\}')
_TEXT = re.compile(rb'\{\s*"type"\s*:\s*"text"\s*,\s*"text"\s*:\s*"')
_TEXT_END = re.compile(rb'"\s*\}')


class Item:
    """One distinct media item of a request; `place` is where it stands first."""

    __slots__ = ("client_uuid", "index", "kind", "payload", "place", "where")

    def __init__(
        self, index: int, kind: str, where: str, place: Place, client_uuid: str | None, *, payload: bool
    ) -> None:
        self.index = index
        """Of the media part, counting identical ones each."""
        self.kind = kind
        self.where = where
        self.place = place
        self.client_uuid = client_uuid
        self.payload = payload
        """False for a part that names only a uuid."""


class Plan:
    """What a chat request needs."""

    __slots__ = ("body", "items", "model", "options", "places", "stream")

    def __init__(self, body: bytes | bytearray) -> None:
        self.body = body
        self.items: list[Item] = []
        """Distinct items, in order of appearance."""
        self.places: list[tuple[Place, int]] = []
        """Every media part in order of appearance, with its item's position in `items`."""
        self.model = ""
        self.stream = False
        self.options = b"{"
        """The members that every encoder request shares, ending in a comma; empty but for a brace."""


def parse(
    body: bytes | bytearray,
    *,
    kinds: frozenset[str],
    most: int | None = None,
    keep_uuid: bool = False,
    allow_bare: bool = False,
) -> Plan:
    """Plan a chat request, or raise the `Failure` (400) that answers it.

    `kinds` are encoded, others refused, and so are more than `most` distinct items. With `keep_uuid` the
    client's uuids stay and tell items apart; with `allow_bare` a part may name a uuid and no payload.
    """
    plan = Plan(body)
    base = 3 if body.startswith(BOM) else 0
    try:
        check_utf8(body)
        chat = _read(memoryview(body)[base:] if base else body)
    except RecursionError:
        raise bad_request("The body's JSON is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise bad_request(f"The body is not a chat request: {error}") from None
    except msgspec.DecodeError as error:
        raise bad_request(f"The body is not a JSON object: {error}") from None
    if chat.messages is None:
        raise bad_request("messages: a list of messages is needed", param="messages")
    plan.stream = chat.stream is True
    if sum(len(m.content) for m in chat.messages if isinstance(m.content, list)) > PARTS:
        raise bad_request(f"messages: more than {PARTS} content parts", param="messages")
    for i, message in enumerate(chat.messages):
        if isinstance(message.content, list):
            for j, raw in enumerate(message.content):
                _take(plan, raw, i, j, kinds, keep_uuid=keep_uuid, allow_bare=allow_bare)
                # Looked at here: each item is compared with those before it.
                if most is not None and len(plan.items) > most:
                    raise bad_request(
                        f"messages: more than {most} different media items, the most in one request",
                        param="messages",
                    )
    _share(plan, chat)
    return plan


def check_utf8(body: bytes | bytearray) -> None:
    """Raise a 400 when a body is not UTF-8."""
    if body.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = memoryview(body)
    at = 0
    try:
        for at in range(0, len(body), UTF8_STEP):
            decoder.decode(view[at : at + UTF8_STEP])
        at = len(body)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        where = at - len(decoder.getstate()[0]) + error.start
        raise bad_request(f"The body is not UTF-8: {error.reason} at byte {where}") from None


def _read(body: Buffer) -> _Chat:
    try:
        return _chat.decode(body)
    except msgspec.ValidationError:
        # Either it is no chat request, or what is wrong is overruled by a later key of the same name.
        loose = _loose_chat.decode(body)
    messages = _loose_messages.decode(loose.messages)
    return _Chat(
        messages=None if messages is None else [_Message(_content.decode(m.content)) for m in messages],
        model=loose.model,
        stream=loose.stream,
        mm_processor_kwargs=loose.mm_processor_kwargs,
        media_io_kwargs=loose.media_io_kwargs,
        priority=loose.priority,
    )


def _take(
    plan: Plan, raw: Raw, i: int, j: int, kinds: frozenset[str], *, keep_uuid: bool, allow_bare: bool
) -> None:
    body = plan.body
    start, end = span(body, raw)
    if body[start] != 0x7B:
        return
    if _matches(body, start, end, _IMAGE, _IMAGE_END):
        kind, client_uuid, place, payload = "image_url", None, Place(start, end), True
        if kind in kinds:
            _add(plan, kind, (i, j), place, client_uuid, payload=payload, keep_uuid=keep_uuid)
            return
    elif _matches(body, start, end, _TEXT, _TEXT_END):
        return
    where = f"messages[{i}].content[{j}]"
    try:
        found = kind_of(raw, where)
        if found is None:
            return
        kind, part = found
        payload = has_payload(kind, part)
    except msgspec.DecodeError as error:
        raise bad_request(f"{where}: {error}", param=where) from None
    if kind not in kinds:
        raise bad_request(
            f"{where}: parts of type {kind} are not encoded here, so they cannot be served", param=where
        )
    client_uuid = _client_uuid(part, where)
    if not payload and not (allow_bare and client_uuid is not None):
        raise bad_request(
            f"{where}: {kind} without data asks for what a server may have cached; "
            "send the data, since items are encoded anew for each request",
            param=where,
        )
    place = Place(start, end) if part.uuid is ABSENT else without_uuid(body, start, end)
    _add(plan, kind, (i, j), place, client_uuid, payload=payload, keep_uuid=keep_uuid)


def _matches(
    body: bytes | bytearray, start: int, end: int, head: re.Pattern[bytes], tail: re.Pattern[bytes]
) -> bool:
    """Whether a part has exactly the usual spelling, with one non-empty string."""
    m = head.match(body, start, end)
    if m is None:
        return False
    first = m.end()
    quote = body.find(b'"', first, end)
    return quote > first and body[quote - 1] != 0x5C and tail.fullmatch(body, quote, end) is not None


def _add(
    plan: Plan,
    kind: str,
    at: tuple[int, int],
    place: Place,
    client_uuid: str | None,
    *,
    payload: bool,
    keep_uuid: bool,
) -> None:
    for position, item in enumerate(plan.items):
        if (not keep_uuid or item.client_uuid == client_uuid) and _same(plan.body, item.place, place):
            plan.places.append((place, position))
            return
    where = f"messages[{at[0]}].content[{at[1]}]"
    item = Item(len(plan.places), kind, where, place, client_uuid, payload=payload)
    plan.places.append((place, len(plan.items)))
    plan.items.append(item)


def _same(body: bytes | bytearray, a: Place, b: Place) -> bool:
    """Whether two parts are equal byte for byte; a sample first, so that images are rarely copied."""
    if a.size != b.size:
        return False
    if len(a.kept) == 1 and len(b.kept) == 1:
        (a0, a1), (b0, b1) = a.kept[0], b.kept[0]
        middle = (a1 - a0) // 2
        size = min(48, middle)
        if body[a1 - size : a1] != body[b1 - size : b1] or (
            body[a0 + middle : a0 + middle + size] != body[b0 + middle : b0 + middle + size]
        ):
            return False
        return body.startswith(bytes(memoryview(body)[a0:a1]), b0)
    view = memoryview(body)
    return b"".join(view[s:e] for s, e in a.kept) == b"".join(view[s:e] for s, e in b.kept)


def _client_uuid(part: Part, where: str) -> str | None:
    if part.uuid is ABSENT:
        return None
    raw = bytes(part.uuid)
    if raw == b"null":
        return None
    if raw[:1] != b'"':
        raise bad_request(f"{where}.uuid: not a string", param=f"{where}.uuid")
    value: str = json.loads(raw)
    return value


def _share(plan: Plan, chat: _Chat) -> None:
    if chat.model is not ABSENT:
        raw = bytes(chat.model)
        if raw[:1] == b'"' and len(raw) <= 1024:
            try:
                plan.model = msgspec.json.decode(raw, type=str)[:256]
            except msgspec.DecodeError as error:
                raise bad_request(f"model: {error}", param="model") from None
    if plan.items:
        pairs = (
            (b"model", chat.model),
            (b"mm_processor_kwargs", chat.mm_processor_kwargs),
            (b"media_io_kwargs", chat.media_io_kwargs),
            (b"priority", chat.priority),
        )
        plan.options += b"".join(b'"%b":%b,' % (name, bytes(raw)) for name, raw in pairs if raw is not ABSENT)


def _tail(place: Place, uuid: bytes | None) -> bytes:
    if uuid is None:
        return b"}"
    return b'%b"uuid":"%b"}' % (b"" if place.bare else b",", uuid)


def encoder_body(plan: Plan, item: Item, uuid: bytes | None) -> list[Buffer]:
    """The request that encodes one item, as slices; `uuid` None keeps the part as the client sent it."""
    view = memoryview(plan.body)
    head = plan.options + b'"max_tokens":1,"messages":[{"role":"user","content":['
    if uuid is None:
        return [head, view[item.place.start : item.place.end], b"]}]}"]
    parts: list[Buffer] = [head]
    parts += [view[start:end] for start, end in item.place.kept]
    parts.append(_tail(item.place, uuid) + b"]}]}")
    return parts


def pd_body(plan: Plan, uuids: Sequence[bytes] | None) -> list[Buffer]:
    """The client's body with each media part's uuid; `uuids` by position in `items`, None: unchanged."""
    if uuids is None or not plan.places:
        return [plan.body]
    view = memoryview(plan.body)
    parts: list[Buffer] = []
    done = 0
    for place, position in plan.places:
        kept = place.kept
        if kept[0][0] == place.start:
            parts.append(view[done : kept[0][1]])
            rest = kept[1:]
        else:
            parts.append(view[done : place.start])
            rest = kept
        parts += [view[start:end] for start, end in rest]
        parts.append(_tail(place, uuids[position]))
        done = place.end
    parts.append(view[done:])
    return parts


def is_fetched(plan: Plan, item: Item) -> bool:
    """Whether an encoder may have to fetch an item: no data URL is seen where one begins as a rule."""
    return plan.body.find(b'"data:', item.place.start, item.place.start + FIRST_BYTES) < 0


def content_uuid(plan: Plan, item: Item) -> bytes:
    """An identity that follows from content, processing options and the client's own uuid, 32 hex digits."""
    view = memoryview(plan.body)
    digest = hashlib.blake2b(digest_size=16, person=b"eccon-content")
    digest.update(plan.options)
    digest.update(item.kind.encode())
    digest.update(json.dumps(item.client_uuid).encode())
    for start, end in item.place.kept:
        digest.update(view[start:end])
    return digest.hexdigest().encode()


def fingerprint(body: bytes | bytearray) -> int:
    """A number by which the same body is known again in this process; large bodies are sampled."""
    size = len(body)
    if size <= 16384:
        return hash((size, bytes(body)))
    step = size // 16
    return hash(
        (size, b"".join(bytes(body[i : i + 512]) for i in range(0, size - 512, step)), bytes(body[-512:]))
    )

"""JSON as text: bodies spelled in odd ways, and trees that keep every token as it was written."""

import json
import random
import re
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.proxy.classify import MEDIA

__all__ = ["Node", "bodies", "media_payload", "read", "without_uuids"]

_TOKEN = re.compile(r'[ \t\r\n]*("(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+)')


@dataclass
class Node:
    """A value: members of an object in order, elements of a list, or a token as written."""

    members: "list[tuple[str, Node]] | None" = None
    elements: "list[Node] | None" = None
    token: str = ""


def read(text: str) -> Node:
    """The tree of a JSON text, doubled keys, order and spelling of scalars and keys kept."""
    tokens = _TOKEN.findall(text)
    node, at = _value(tokens, 0)
    assert at == len(tokens), tokens[at : at + 5]
    return node


def _value(tokens: list[str], at: int) -> tuple[Node, int]:
    token = tokens[at]
    if token not in "{[":
        return Node(token=token), at + 1
    node = Node(members=[]) if token == "{" else Node(elements=[])
    at += 1
    while tokens[at] not in "}]":
        if tokens[at] == ",":
            at += 1
        if node.members is not None:
            key = tokens[at]
            assert tokens[at + 1] == ":"
            value, at = _value(tokens, at + 2)
            node.members.append((key, value))
        else:
            assert node.elements is not None
            value, at = _value(tokens, at)
            node.elements.append(value)
    return node, at + 1


def without_uuids(node: Node) -> Node:
    """The tree without the `uuid` members of the parts of messages."""
    parts = [
        part
        for name, messages in node.members or ()
        if json.loads(name) == "messages"
        for message in messages.elements or ()
        for key, content in message.members or ()
        if json.loads(key) == "content"
        for part in content.elements or ()
    ]
    for part in parts:
        if part.members is not None:
            part.members = [(key, value) for key, value in part.members if json.loads(key) != "uuid"]
    return node


def _spelled_string(value: str, dice: random.Random) -> str:
    if dice.random() < 0.8:
        return json.dumps(value, ensure_ascii=dice.random() < 0.5)
    return '"' + "".join(_spelled_char(char, dice) for char in value) + '"'


def _spelled_char(char: str, dice: random.Random) -> str:
    if ord(char) < 0x10000 and dice.random() < 0.3:
        return f"\\u{ord(char):04x}"
    return json.dumps(char, ensure_ascii=False)[1:-1]


def _space(dice: random.Random) -> str:
    return dice.choice(("", "", "", "", " ", "\n", "\t ", "\r\n"))


def _spelled(value: Any, dice: random.Random) -> str:
    """A JSON text of a value: white space, escapes and doubled keys as they come."""
    if isinstance(value, str):
        return _spelled_string(value, dice)
    if isinstance(value, list):
        return "[" + _space(dice) + ",".join(_spelled(v, dice) + _space(dice) for v in value) + "]"
    if not isinstance(value, dict):
        return value.text if isinstance(value, _Written) else json.dumps(value)
    members = []
    for key, item in value.items():
        if dice.random() < 0.05:
            # The last of doubled keys counts, whatever stood before.
            members.append((key, dice.choice(_JUNK)))
        members.append((key, _spelled(item, dice)))
    spelled = (
        _space(dice) + _spelled_string(key, dice) + _space(dice) + ":" + _space(dice) + item + _space(dice)
        for key, item in members
    )
    return "{" + ",".join(spelled) + _space(dice) + "}"


@dataclass(frozen=True)
class _Written:
    """A number that is written as it is."""

    text: str


_JUNK = (
    "null",
    "1",
    '"text"',
    "[]",
    "{}",
    '"image_url"',
    '[{"type":"image_url"}]',
    '{"url":"x"}',
    '"}{][\\""',
)
_words = st.text(st.characters(codec="utf-8"), max_size=8)
_number = st.sampled_from(
    [_Written(text) for text in ("0", "-0.0", "1.0", "1E5", "1e400", "12345678901234567890123")]
)
_scalar = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), _number, _words)
_small = st.recursive(
    _scalar, lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(_words, inner, max_size=2))
)
_url = st.sampled_from(["data:image/png;base64,AAAA", "http://a/b.png", 'x"}],{', "한", "data:,\\"])


@st.composite
def media_payload(draw: st.DrawFn, kind: str) -> Any:
    """What may stand under the key of a media kind; rarely nothing."""
    if draw(st.integers(0, 11)) == 0:
        return None
    if kind.endswith("_url"):
        url = draw(_url)
        if draw(st.integers(0, 4)) == 0:
            return url
        return draw(
            st.sampled_from([{"url": url}, {"url": url, "detail": "low"}, {"uuid": "in", "url": url}])
        )
    if kind == "input_audio":
        return {"data": draw(_url), "format": "wav"}
    return draw(_url)


_KINDS = sorted(MEDIA)


@st.composite
def _part(draw: st.DrawFn) -> Any:
    shape = draw(st.integers(0, 9))
    if shape == 0:
        return draw(_words)
    if shape <= 2:
        part: dict[str, Any] = {"type": draw(st.sampled_from(["text", "input_text", "refusal", "thinking"]))}
        part["text"] = draw(_words)
    elif shape == 3:
        part = {"type": draw(st.one_of(_words, st.none())), "x": draw(_small)}
    else:
        kind = draw(st.sampled_from([*_KINDS, *["image_url"] * 8]))
        key = "image_url" if kind == "input_image" else kind
        part = {"type": kind, key: draw(media_payload("image_url" if key == "image_url" else kind))}
        if kind == "input_image":
            part[key] = draw(_url)
        if draw(st.integers(0, 5)) == 0:
            part.pop("type")
        elif draw(st.integers(0, 9)) == 0:
            part["type"] = draw(st.sampled_from([None, "text", "hologram", "video_url"]))
        if draw(st.integers(0, 14)) == 0:
            extra = draw(st.sampled_from(_KINDS))
            part.setdefault(extra, draw(media_payload(extra)))
    if draw(st.integers(0, 5)) == 0:
        part["uuid"] = draw(st.one_of(st.none(), _words.filter(bool)))
    for key, value in draw(st.dictionaries(_words, _small, max_size=1)).items():
        part.setdefault(key, value)
    keys = draw(st.permutations(list(part)))
    return {key: part[key] for key in keys}


@st.composite
def _message(draw: st.DrawFn) -> dict[str, Any]:
    content = draw(st.one_of(_words, st.none(), *[st.lists(_part(), max_size=4)] * 4))
    role = draw(st.sampled_from(["user", "system", "assistant", "tool", "developer"]))
    return {"role": role, "content": content}


@st.composite
def bodies(draw: st.DrawFn) -> str:
    """The text of a chat request."""
    body: dict[str, Any] = {"model": "m", "messages": draw(st.lists(_message(), max_size=3))}
    for key, value in draw(st.dictionaries(_words, _small, max_size=2)).items():
        body.setdefault(key, value)
    if draw(st.booleans()):
        body["mm_processor_kwargs"] = {"max_pixels": draw(st.sampled_from([100, 200]))}
    body = {key: body[key] for key in draw(st.permutations(list(body)))}
    # Spelling comes from one seed: quicker than a draw for every blank, and only the body needs to shrink.
    dice = random.Random(draw(st.integers(0, 2**32)))
    return _space(dice) + _spelled(body, dice) + _space(dice)

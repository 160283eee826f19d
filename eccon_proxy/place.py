"""Where a media part stands in a body, and which of its bytes are kept when it gets another `uuid`."""

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]

__all__ = ["Place", "without_uuid"]

Span = tuple[int, int]
# Values are only skipped: a number may have more digits than Python turns into an int.
_members = json.JSONDecoder(parse_int=len, parse_float=len)
_SPACE = re.compile(r"[ \t\n\r]*")


class Place:
    """One occurrence of a media part in the body.

    `kept` are the slices of the part without its closing brace and without the client's own uuid keys;
    `end` is the offset behind the brace. `bare` says that no member is left before a uuid of ours.
    """

    __slots__ = ("bare", "end", "kept", "start")

    def __init__(self, start: int, end: int, kept: tuple[Span, ...] = (), *, bare: bool = False) -> None:
        self.start = start
        self.end = end
        self.kept = kept or ((start, end - 1),)
        self.bare = bare

    @property
    def size(self) -> int:
        """Bytes kept."""
        return sum(end - start for start, end in self.kept)


def without_uuid(body: bytes | bytearray, start: int, end: int) -> Place:
    """The place of a part whose `uuid` members are cut out, each with one comma."""
    # latin-1 keeps one character a byte, so offsets stay those of the body.
    text = str(memoryview(body)[start:end], "latin-1")
    members: list[tuple[int, int, bool]] = []
    at = _space(text, 1)
    while text[at] != "}":
        key_at = at
        key, at = scanstring(text, at + 1, True)
        at = _space(text, _space(text, at) + 1)
        _, at = _members.raw_decode(text, at)
        members.append((key_at, at, key == "uuid"))
        at = _space(text, at)
        if text[at] == ",":
            at = _space(text, at + 1)
    kept: list[Span] = []
    last_end = members[0][0]
    kept.append((0, last_end))
    for i, (key_at, value_end, is_uuid) in enumerate(members):
        if not is_uuid:
            # White space and comma before a member stay with it, unless it became the first.
            begin = key_at if len(kept) == 1 else members[i - 1][1]
            kept.append((begin, value_end))
        last_end = value_end
    bare = len(kept) == 1
    kept.append((last_end, len(text) - 1))
    merged: list[Span] = []
    for begin, stop in kept:
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], stop)
        elif begin < stop:
            merged.append((begin, stop))
    return Place(start, end, tuple((start + b, start + e) for b, e in merged), bare=bare)


def _space(text: str, at: int) -> int:
    m = _SPACE.match(text, at)
    return m.end() if m else at

"""Pixels of an image in a data URL, from its header bytes alone: PNG, JPEG, GIF, WebP, BMP."""

import base64
import binascii

from eccon_proxy.plan import Item, Plan

__all__ = ["pixels", "size_of"]

HEAD = 512
"""Bytes of a part in which its data URL must have begun."""
STEPS = (64, 4096, 65536, 262144)
"""Bytes of the image that are looked at, more when an EXIF block or the like stands before the size."""
LARGEST = 100_000_000
"""Pixels beyond which a header tells nonsense: nobody would encode that."""
_NO_SIZE = frozenset({0x01, *range(0xD0, 0xD9)})
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})


def pixels(plan: Plan, item: Item) -> int | None:
    """Width times height, None when the bytes are elsewhere or say nothing."""
    body = plan.body
    start, end = item.place.start, item.place.end
    mark = body.find(b"base64,", start, min(start + HEAD, end))
    if mark < 0:
        return None
    at = mark + 7
    for step in STEPS:
        chars = bytes(memoryview(body)[at : min(at + step // 3 * 4, end)]).replace(b"\\/", b"/")
        whole = len(chars.partition(b'"')[0])
        try:
            data = base64.b64decode(chars[: whole // 4 * 4])
        except binascii.Error:
            return None
        size = size_of(data)
        if size is not None:
            return size[0] * size[1] if 0 < size[0] * size[1] <= LARGEST else None
        if whole < len(chars) or data[:2] != b"\xff\xd8":
            return None
    return None


def size_of(data: bytes) -> tuple[int, int] | None:
    """Width and height that the beginning of an image file tells, None when it does not."""
    if data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) >= 24:
        return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    if data[:6] in {b"GIF87a", b"GIF89a"} and len(data) >= 10:
        return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    if data[:2] == b"BM" and len(data) >= 26:
        height = int.from_bytes(data[22:26], "little", signed=True)
        return int.from_bytes(data[18:22], "little"), abs(height)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP" and len(data) >= 30:
        return _webp(data)
    return _jpeg(data) if data[:2] == b"\xff\xd8" else None


def _webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return None


def _jpeg(data: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 <= len(data):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
        elif marker in _NO_SIZE:
            at += 2
        elif marker in _FRAMES:
            return int.from_bytes(data[at + 7 : at + 9], "big"), int.from_bytes(data[at + 5 : at + 7], "big")
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None

"""Ids of requests: the client's when it is usable, unique to each server behind, at most 128 characters."""

import os
import re
import zlib

__all__ = ["LONGEST", "derived", "new_id", "usable"]

LONGEST = 128
_VISIBLE = re.compile(rb"[\x21-\x7e]{1,128}")
_PREFIX = os.urandom(6).hex()
_serial = 0


def usable(value: bytes) -> bool:
    """Whether a client's id may stand in headers, logs and vLLM's own ids."""
    return _VISIBLE.fullmatch(value) is not None


def new_id() -> str:
    """An id for a request that brought none."""
    global _serial  # noqa: PLW0603  a counter of the process
    _serial += 1
    return f"{_PREFIX}-{_serial:x}"


def derived(parent: str, suffix: str) -> bytes:
    """The id of one upstream request of `parent`; a long parent is shortened but stays unique."""
    whole = f"{parent}-{suffix}"
    if len(whole) > LONGEST:
        whole = f"{parent[: LONGEST - 20 - len(suffix)]}~{zlib.crc32(parent.encode()):08x}-{suffix}"
    return whole.encode()

"""A TOML text and where its keys stand in it: what a message needs to name file, line, key and value."""

import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ABSENT", "Key", "Text", "TextError", "dotted", "value_at"]

Key: TypeAlias = tuple[str | int, ...]
"""Names of tables and keys, and places in arrays of tables."""

ABSENT = object()
"""The value of a key that is not written."""

_NAME = r"(?:[\w-]+|\"[^\"]*\"|'[^']*')"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*\]\]?\s*(?:#.*)?$")
_PAIR = re.compile(rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")
_FENCE = re.compile(r'"""|\'\'\'')


class TextError(Exception):
    """It is not TOML; the message is complete."""


class Text:
    """A text as if read from `path`. CRLF counts as one line end.

    Raises:
        TextError: it is not TOML.
    """

    def __init__(self, text: str, path: Path) -> None:
        self.path = path
        self._lines = text.replace("\r\n", "\n").split("\n")
        try:
            self.data: dict[str, Any] = tomllib.loads("\n".join(self._lines))
        except tomllib.TOMLDecodeError as e:
            found = re.search(r"\(at line (\d+), column (\d+)\)", str(e))
            line, column = found.groups() if found else (str(len(self._lines)), "1")
            reason = re.sub(r" \(at .*\)$", "", str(e))
            msg = f"{path}:{line}:{column}: not TOML: {reason}"
            raise TextError(msg) from e
        self._places = dict(self._scan())
        self.environment: dict[Key, str] = {}
        """Variables that stand in place of a key."""

    def _scan(self) -> "list[tuple[Key, int]]":
        places: list[tuple[Key, int]] = []
        counts: dict[Key, int] = {}
        table: Key = ()
        fence = ""
        for number, line in enumerate(self._lines, 1):
            if fence:
                fence = "" if fence in line else fence
                continue
            if header := _HEADER.match(line):
                table = self._table(_split(header[2]), header[1] == "[[", counts)
                places.append((table, number))
            elif pair := _PAIR.match(line):
                places.append((table + _split(pair[1]), number))
                opened = _FENCE.findall(line)
                fence = opened[0] if len(opened) % 2 else ""
        return places[::-1]

    def _table(self, names: Key, is_array: bool, counts: dict[Key, int]) -> Key:
        """The header's table, with the place of each array of tables on the way."""
        here: Key = ()
        for i, name in enumerate(names):
            here = (*here, name)
            if is_array and i == len(names) - 1:
                counts[here] = counts.get(here, -1) + 1
            if here in counts:
                here = (*here, counts[here])
        return here

    def line(self, key: Key) -> int | None:
        """Line of `key`, or of the nearest table above it; None when neither is written."""
        for length in range(len(key), 0, -1):
            if line := self._places.get(key[:length]):
                return line
        return None

    def written(self, key: Key) -> int | None:
        """Line of exactly `key`; None when it is not written by itself."""
        return self._places.get(key)

    def where(self, key: Key) -> str:
        """`FILE:LINE`, or the variable, that `key` has its value from."""
        if variable := self.environment.get(key):
            return variable
        line = self.line(key)
        return f"{self.path}:{line}" if line else f"{self.path}"

    def fault(self, key: Key, value: object, reason: str) -> str:
        """One complete line: where, which key, which value, why."""
        shown = "" if value is ABSENT else f" = {_show(value)}"
        return f"{self.where(key)}: {dotted(key)}{shown}: {reason}"


def dotted(key: Key) -> str:
    """`encoders.override[1].port`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")


def value_at(data: object, key: Key) -> object:
    """The value of `key` in a parsed TOML, or ABSENT."""
    for part in key:
        if isinstance(part, int):
            if not isinstance(data, list) or part >= len(data):
                return ABSENT
            data = data[part]
        elif isinstance(data, Mapping) and part in data:
            data = data[part]
        else:
            return ABSENT
    return data


def _split(name: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in re.findall(_NAME, name))


def _show(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it, TOML has this one
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= 60 else text[:57] + "..."

"""The configuration in force, as TOML, with where each value comes from."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from eccon.config import ClusterFile, Topology
from eccon.supervisor.secrets import shown_env
from eccon.tomltext import ABSENT, Key, Text, value_at

__all__ = ["DEFAULT", "lines", "values"]

DEFAULT = "default"


def values(topology: Topology, text: Text) -> Iterator[tuple[Key, object, str]]:
    """Every key that is in force: its value (None: not set; secrets masked) and origin.

    An origin is `FILE:LINE`, the variable's name, or "default".
    """
    yield from _table({name: getattr(topology, name) for name in ClusterFile.__struct_fields__}, (), text)


def _table(table: Mapping[str, object], key: Key, text: Text) -> Iterator[tuple[Key, object, str]]:
    """A table's own values before the tables in it: in TOML these end it."""
    for name, value in table.items():
        if not _inner(value):
            yield (*key, name), value, _origin((*key, name), text)
    for name, value in table.items():
        for place, inner in _inner(value):
            here = (*key, name, *place)
            yield from _table(dict(shown_env(inner)) if name == "env" else inner, here, text)


def _inner(value: object) -> list[tuple[Key, dict[str, Any]]]:
    """Tables that a value consists of, and their places in an array; none for a plain value."""
    if isinstance(value, msgspec.Struct):
        return [((), {f: getattr(value, f) for f in value.__struct_fields__})]
    if isinstance(value, Mapping) and value:
        return [((), dict(value))]
    if isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
        return [((i,), {f: getattr(v, f) for f in v.__struct_fields__}) for i, v in enumerate(value)]
    return []


def _origin(key: Key, text: Text) -> str:
    return DEFAULT if value_at(text.data, key) is ABSENT else text.where(key)


def lines(topology: Topology, text: Text) -> Iterator[str]:
    """TOML; each value's origin in a comment beside it."""
    header: Key = ()
    shown: list[tuple[str, str]] = []
    for key, value, origin in values(topology, text):
        if key[:-1] != header:
            header = key[:-1]
            shown += [("", ""), (_title(header), "")]
        name = _key(str(key[-1]))
        if value is None:
            shown.append((f"# {name} is not set", origin))
        else:
            shown.append((f"{name} = {_toml(value)}", origin))
    width = min(48, max(len(left) for left, _ in shown))
    for left, origin in shown:
        yield f"{left.ljust(width)}  # {origin}" if origin else left


def _title(table: Key) -> str:
    names = ".".join(_key(part) for part in table if isinstance(part, str))
    return f"[[{names}]]" if isinstance(table[-1], int) else f"[{names}]"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """TOML's basic strings, numbers, booleans and arrays are written as JSON's; only tables are not."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return msgspec.json.encode(value).decode()

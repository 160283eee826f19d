"""Checks TOML against a struct, key by key: every fault at once, each with its line and the nearest key.

The struct is the only description of what is allowed; the JSON Schema is generated from it too.
"""

import difflib
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from eccon.tomltext import ABSENT, Key, Text, dotted, value_at

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["faults", "fields", "nearest", "overlay", "reason"]

VARIABLE = "ECCON__"


def fields(kind: type[msgspec.Struct], hidden: tuple[str, ...] = ()) -> dict[str, Any]:
    """Names and types, in order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in msgspec.structs.fields(kind) if f.name not in hidden}


def faults(kind: type[msgspec.Struct], text: Text, key: Key = ()) -> Iterator[str]:
    """What in the table at `key` does not fit `kind`, one complete line each."""
    table = value_at(text.data, key)
    if not isinstance(table, Mapping):
        yield text.fault(key, table, "expected a table of keys")
        return
    known = fields(kind)
    for name, value in table.items():
        here = (*key, name)
        if name not in known:
            yield text.fault(here, value, f"unknown key; {nearest(name, known)}")
        elif (inner := _struct(known[name])) is not None:
            yield from faults(inner, text, here)
        elif (inner := _element(known[name])) is not None and isinstance(value, list):
            for i in range(len(value)):
                yield from faults(inner, text, (*here, i))
        elif _is_free_table(known[name]) and isinstance(value, Mapping):
            yield from _entries(value, known[name], here, text)
        else:
            yield from _wrong(value, known[name], here, text)
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in table:
            yield text.fault((*key, field.name), ABSENT, "is required")


def _entries(table: Mapping[str, object], kind: Any, key: Key, text: Text) -> Iterator[str]:
    """Of a free table: each under its own name."""
    names, values = typing.get_args(_bare(kind))
    for name, value in table.items():
        try:
            msgspec.convert(name, names)
        except msgspec.ValidationError:
            yield text.fault((*key, name), value, "this cannot be the name of one")
        yield from _wrong(value, values, (*key, name), text)


def _wrong(value: object, kind: Any, key: Key, text: Text) -> Iterator[str]:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        yield text.fault(key, value, reason(str(e), kind))
    else:
        if _has_nul(value):
            yield text.fault(key, value, "holds a NUL, which no argument, variable or path can")


def _has_nul(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_has_nul(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return any(map(_has_nul, value))
    return isinstance(value, str) and "\0" in value


def reason(message: str, kind: Any = None) -> str:
    """msgspec's words, in ours and without its path; `kind` is the type that was wanted."""
    if "enum value" in message and (choices := [str(c) for c in _choices(kind)]):
        wrong = re.search(r"enum value '(.*?)'", message)
        near = difflib.get_close_matches(wrong[1], choices, 1) if wrong else []
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"expected one of {', '.join(choices)}{hint}"
    if "`^(https?" in message or "https?" in message:
        return "expected a URL, as http://10.0.0.5:19100"
    said = re.sub(r" - at `.*`$", "", message).replace("`", "")
    said = re.sub(r"\bint\b", "a whole number", said)
    said = re.sub(r"\bfloat\b", "a number", said)
    said = re.sub(r"\bstr\b", "a string", said)
    said = re.sub(r"\barray\b", "a list", said)
    said = re.sub(r"\bobject\b", "a table of keys", said)
    said = re.sub(r"\bnull\b", "nothing", said)
    return said[:1].lower() + said[1:]


def nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    """A hint at what was meant."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"


def overlay(kind: type[msgspec.Struct], text: Text, environment: Mapping[str, str]) -> Iterator[str]:
    """Puts the values of `ECCON__TABLE__KEY` variables in place of the text's; yields what cannot be done.

    A value for text is taken as it is, any other is read as TOML. Arrays of tables cannot be reached.
    """
    for variable, value in sorted(environment.items()):
        if not variable.startswith(VARIABLE):
            continue
        names = variable[len(VARIABLE) :].split("__")
        key: Key = ()
        target: Any = kind
        table: Any = text.data
        for i, raw in enumerate(names):
            inside = _struct(target)
            last = i == len(names) - 1
            # Keys of free tables (`env`) keep their case; all others are lower.
            name = raw.lower() if inside is not None else raw
            known = fields(inside) if inside is not None else {}
            if inside is not None and name not in known:
                yield f"{variable}: {dotted((*key, name))}: unknown key; {nearest(name, known)}"
                break
            if inside is None and not _is_free_table(target):
                yield f"{variable}: {dotted(key)} is no table"
                break
            target = known[name] if inside is not None else _values(target)
            key = (*key, name)
            if last:
                table[name] = _read(value, target)
                text.environment[key] = variable
            else:
                table = table.setdefault(name, {})
                if not isinstance(table, dict):
                    yield f"{variable}: {dotted(key)} is no table in {text.where(key)}"
                    break


def _read(value: str, kind: Any) -> object:
    if _bare(kind) is str:
        return value
    try:
        return tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return value  # the check of its type says what is wrong with it


def _bare(kind: Any) -> Any:
    """A type without what is annotated to it, and without `None`."""
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        rest = [a for a in typing.get_args(kind) if a is not type(None)]
        return _bare(rest[0]) if len(rest) == 1 else kind
    if typing.get_origin(kind) is typing.Literal:
        return str
    return kind


def _choices(kind: Any) -> tuple[Any, ...]:
    """What a type of given words allows; empty for any other."""
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return tuple(c for part in typing.get_args(kind) for c in _choices(part))
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _struct(kind: Any) -> type[msgspec.Struct] | None:
    kind = _bare(kind)
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def _element(kind: Any) -> type[msgspec.Struct] | None:
    """Of an array of tables."""
    kind = _bare(kind)
    return _struct(typing.get_args(kind)[0]) if typing.get_origin(kind) is list else None


def _is_free_table(kind: Any) -> bool:
    return typing.get_origin(_bare(kind)) is dict


def _values(kind: Any) -> Any:
    return typing.get_args(_bare(kind))[1]

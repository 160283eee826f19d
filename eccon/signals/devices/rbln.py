"""Rebellions NPUs by `rbln-smi -j -g` (`rbln-stat --json` before its renaming).

Shape as of KMD 3.0.0. Nearly everything is a string with a unit; `npu` is an index inside a group, so it
repeats, and the order is arbitrary: a device is known by its node. The text form of the tool drifts between
versions and is not read.
"""

import re
import shutil
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from eccon.model import Npu, NpuContext
from eccon.signals.devices.reading import Context, Reading, ToolError, used_by
from eccon.signals.devices.tool import output_of

__all__ = ["parse", "read"]

COMMANDS = (("rbln-smi", "-j", "-g"), ("rbln-smi", "-j"), ("rbln-stat", "--json"))
LIMIT_S = 5.0
SCALE = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def read() -> Reading:
    """One look.

    Raises:
        ToolError: no tool is installed, or it says nothing that is understood in time.
    """
    here = [argv for argv in COMMANDS if shutil.which(argv[0])]
    if not here:
        msg = "rbln-smi is not installed: no device figures"
        raise ToolError(msg, missing=True)
    problem = ToolError("")
    for argv in here:
        try:
            return parse(output_of(argv, LIMIT_S), argv[0])
        except ToolError as e:
            problem = e
    raise problem


def parse(text: bytes, tool: str = "rbln-smi") -> Reading:
    """What the tool's JSON says. Fields that are missing or not understood are left out.

    Raises:
        ToolError: it is not the tool's JSON.
    """
    try:
        said: Any = msgspec.json.decode(text)
    except msgspec.DecodeError as e:
        msg = f"{tool} does not say JSON: {e}"
        raise ToolError(msg) from e
    rows = said.get("devices") if isinstance(said, dict) else None
    if not isinstance(rows, list):
        msg = f"{tool} names no devices"
        raise ToolError(msg)
    devices, places = {}, {}
    for row in rows:
        if isinstance(row, dict) and (npu := _device(row)):
            devices[npu.index] = npu
            places[npu.index] = (str(row.get("npu")), npu.group)
    once = Counter(place for place, _ in places.values())
    found = said.get("contexts")
    contexts = tuple(
        Context(of=context, devices=_devices_of(row, context, places, once))
        for row in (found if isinstance(found, list) else [])
        if isinstance(row, dict) and (context := _context(row))
    )
    return Reading(kind="rbln", tool=tool, devices=devices, contexts=contexts)


def _device(row: Mapping[str, Any]) -> Npu | None:
    node = str(row.get("device") or "")
    number = re.search(r"(\d+)$", node) or re.search(r"^(\d+)$", str(row.get("npu", "")))
    if number is None:
        return None
    memory = row.get("memory")
    memory = memory if isinstance(memory, dict) else {}
    return Npu(
        device=node or f"rbln{number[1]}",
        index=int(number[1]),
        name=_text(row, "name"),
        status=_text(row, "status"),
        util_percent=_number(row.get("util"), "%"),
        memory_used=_bytes(memory.get("used")),
        memory_total=_bytes(memory.get("total")),
        temperature_c=_number(row.get("temperature"), "C"),
        power_w=_watts(row.get("card_power")),
        pstate=_text(row, "pstate"),
        card=_text(row, "sid"),
        group=_text(row, "group_id"),
    )


def _context(row: Mapping[str, Any]) -> NpuContext | None:
    pid = str(row.get("pid", ""))
    if not pid.isdigit():
        return None
    return NpuContext(
        pid=int(pid),
        process=_text(row, "process"),
        memory_bytes=_bytes(row.get("memalloc")),
        status=_text(row, "status"),
    )


def _devices_of(
    row: Mapping[str, Any], context: NpuContext, places: Mapping[int, tuple[str, str]], once: Counter[str]
) -> frozenset[int]:
    """By its node if it is told; by what the process has open; by its index where that does not repeat."""
    if node := re.search(r"(\d+)$", _text(row, "device")):
        return frozenset({int(node[1])})
    place, group = str(row.get("npu")), _text(row, "group_id")
    same = {n for n, (at, of) in places.items() if at == place and (not group or of == group)}
    if len(same) == 1 and (group or once[place] == 1):
        return frozenset(same)
    known = used_by(context.pid)
    return frozenset(known & same or known)


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    return "" if value is None else str(value)


def _number(value: object, unit: str) -> float | None:
    try:
        return float(str(value).strip().removesuffix(unit).strip())
    except ValueError:
        return None


def _watts(value: object) -> float | None:
    found = re.fullmatch(r"\s*([\d.]+)\s*([um]?)W\s*", str(value))
    return round(float(found[1]) * {"u": 1e-6, "m": 1e-3, "": 1.0}[found[2]], 1) if found else None


def _bytes(value: object) -> int | None:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(value))
    return round(float(found[1]) * SCALE[found[2]]) if found else None

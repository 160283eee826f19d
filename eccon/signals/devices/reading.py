"""One look at the devices of this host, whoever made them, and which process uses which."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from eccon.model import Npu, NpuContext

__all__ = ["Context", "Reading", "ToolError", "numbers", "reader"]

PROC = Path("/proc")
VARIABLES = ("RBLN_VISIBLE_DEVICES", "RBLN_DEVICES")


class ToolError(Exception):
    """The devices cannot be read; the message says why. `missing`: there is no such tool here."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """A process's use of a device. `devices` holds the numbers of those it may be on; empty: unknown."""

    of: NpuContext
    devices: frozenset[int] = frozenset()


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """All devices by number, and what uses them."""

    kind: Literal["rbln", "cuda"]
    tool: str
    """Where it comes from, for a person."""
    devices: dict[int, Npu]
    contexts: tuple[Context, ...] = ()

    def of(self, numbers: Iterable[int], pids: Iterable[int]) -> tuple[Npu, ...]:
        """The devices of a process, each with the contexts that its `pids` have there."""
        mine = frozenset(pids)
        found = []
        for number in numbers:
            if npu := self.devices.get(number):
                contexts = tuple(c.of for c in self.contexts if c.of.pid in mine and _may_be_on(c, number))
                found.append(msgspec.structs.replace(npu, contexts=contexts))
        return tuple(found)

    def holders(self, number: int) -> list[NpuContext]:
        """Contexts that are known to be on a device."""
        return [c.of for c in self.contexts if number in c.devices]

    def troubles(self, numbers: Iterable[int]) -> list[str]:
        """Why a process cannot be started on these devices: absent, of several groups, held by another."""
        wanted = list(numbers)
        absent = [n for n in wanted if n not in self.devices]
        found = [f"device {n} is not there: {self.tool} lists {_listed(self.devices)}" for n in absent]
        groups = {self.devices[n].group for n in wanted if n in self.devices} - {""}
        if len(groups) > 1:
            named = " and ".join(sorted(groups))
            found.append(
                f"devices {_listed(wanted)} are of groups {named}; those of one process must share one"
            )
        # A GPU may serve several processes, an NPU refuses the second one.
        held = {n: self.holders(n) for n in wanted} if self.kind == "rbln" else {}
        found += [
            f"device {n} is held by pid {by[0].pid} ({by[0].process or 'unnamed'})"
            for n, by in held.items()
            if by
        ]
        return found

    def alarms(self, npu: Npu) -> dict[str, str]:
        """What is wrong with a device, by what it is about."""
        found = {}
        if npu.status and npu.status.lower() not in {"normal", "ok"}:
            found["status"] = f"{npu.device} is {npu.status}"
        if self.kind == "rbln":
            # P-states of other vendors mean other things.
            if npu.pstate == "P10":
                found["hot"] = f"{npu.device} is throttled by heat" + _degrees(npu)
            elif npu.pstate == "P12":
                found["hangs"] = f"{npu.device} hangs (P12)"
        return found


def reader(kind: str) -> Callable[[], Reading] | None:
    """What reads the devices of that kind; it raises ToolError. None for a kind without devices."""
    if kind == "rbln":
        from eccon.signals.devices import rbln  # noqa: PLC0415  only what is asked for is loaded

        return rbln.read
    if kind == "cuda":
        from eccon.signals.devices import nvml  # noqa: PLC0415  as above

        return nvml.read
    return None


def numbers(shown: str) -> tuple[int, ...]:
    """`0-3,8` as (0, 1, 2, 3, 8)."""
    found: list[int] = []
    for part in shown.split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            found += range(int(first), int(last if last.strip().isdigit() else first) + 1)
    return tuple(found)


def used_by(pid: int, proc: Path = PROC) -> frozenset[int]:
    """Devices that a process has open, else those that its environment names; empty when neither is told."""
    opened = set()
    try:
        for fd in (proc / str(pid) / "fd").iterdir():
            if found := re.fullmatch(r"/dev/rbln(\d+)", _target(fd)):
                opened.add(int(found[1]))
    except OSError:
        opened.clear()
    if opened:
        return frozenset(opened)
    try:
        environment = (proc / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return frozenset()
    said = dict(line.partition(b"=")[::2] for line in environment if b"=" in line)
    for variable in VARIABLES:
        if listed := said.get(variable.encode()):
            return frozenset(numbers(listed.decode(errors="replace")))
    return frozenset()


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _may_be_on(context: Context, number: int) -> bool:
    return not context.devices or number in context.devices


def _listed(found: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(found))) or "none"


def _degrees(npu: Npu) -> str:
    return "" if npu.temperature_c is None else f" ({npu.temperature_c:.0f} °C)"

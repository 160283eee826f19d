"""The host's devices over time: figures onto the board, alarms, who may start, what a stopped process holds.

Everything works without the vendor's tool; then the board says so, and no start or stop waits for devices.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

import msgspec

from eccon.launch import ProcessSpec
from eccon.model import Alarm, Npu, Role
from eccon.signals.devices import Reading, ToolError, numbers, reader
from eccon.supervisor import identity
from eccon.supervisor.board import Board

__all__ = ["DeviceWatch"]

EVERY_S = 2.0
WITHOUT_EVERY_S = 30.0
"""How often a tool that is not there is looked for."""
FRESH_S = 1.0
"""A reading is good for this long: the tool is asked at most once in it."""
FAILED_S = 10.0
"""One that could not be had is not asked for again so soon: a tool may hang each time."""
MIB = 2**20


class DeviceWatch:
    """Reads devices of the kind that the topology names. `run` is its task."""

    def __init__(self, board: Board, kind: str, tree: Callable[[str], AbstractSet[int]]) -> None:
        self._board = board
        self._tree = tree
        self._kind = kind
        self._reading: Reading | None = None
        self._read_at = float("-inf")
        self._asking = asyncio.Lock()
        self._users: dict[str, set[int]] = {}
        """Pids that had contexts in each process's present life."""
        self._alarmed: set[str] = set()

    def set_kind(self, kind: str) -> None:
        """The configuration was read again."""
        if kind != self._kind:
            self._kind, self._reading, self._read_at = kind, None, float("-inf")

    async def run(self, specs: Callable[[], Mapping[str, tuple[ProcessSpec, int | None]]]) -> None:
        """For ever. `specs` tells what is to be shown, each with its main pid while it runs."""
        while True:
            reading = await self.look()
            self._show(reading, specs())
            known = reading is not None or self._kind == "none"
            await asyncio.sleep(EVERY_S if known else WITHOUT_EVERY_S)

    async def look(self, *, newest: bool = False) -> Reading | None:
        """The devices, by a reading that is not old; None when they cannot be read.

        Args: newest: by one that began after this call, for what is decided by it.
        """
        asked = time.monotonic()
        async with self._asking:
            left = self._read_at + (FRESH_S if self._reading else FAILED_S) - time.monotonic()
            if left > 0:
                if not newest or self._reading is None or self._read_at >= asked:
                    return self._reading
                await asyncio.sleep(left)
            begun = time.monotonic()
            read = reader(self._kind)
            note, reading = "", None
            if read is not None:
                try:
                    reading = await asyncio.to_thread(read)
                except ToolError as e:
                    note = str(e)
            if note and note != self._board.cluster.npu_note:
                self._board.log("cluster", note, "warning" if self._reading else "info")
            self._reading, self._read_at = reading, begun
            self._board.set_cluster(npu_source=reading.tool if reading else "", npu_note=note)
            return reading

    async def troubles(self, spec: ProcessSpec) -> list[str]:
        """Why the devices of `spec` do not let it start. It must not run now."""
        if not spec.device or spec.external:
            return []
        reading = await self.look(newest=True)
        return reading.troubles(numbers(spec.device)) if reading else []

    async def held_after(self, name: str, spec: ProcessSpec, pids: Iterable[int]) -> str:
        """What contexts of an ended process (its pids then) its devices still have; empty when none."""
        if not spec.device or spec.external:
            return ""
        reading = await self.look(newest=True)
        if reading is None:
            return ""
        gone = self._users.get(name, set()) | set(pids)
        mine = set(numbers(spec.device))
        for context in reading.contexts:
            on = context.devices & mine
            if context.of.pid in gone or (on and identity.start_ticks(context.of.pid) is None):
                where = ", ".join(
                    reading.devices[n].device for n in sorted(on or mine) if n in reading.devices
                )
                return f"{where} has a context of pid {context.of.pid} yet"
        self._users.pop(name, None)
        return ""

    def free(self, taken: Iterable[int], like: Iterable[int]) -> list[int]:
        """Devices of the host that nobody has: normal, without context, of the make of those of `like`."""
        if self._reading is None:
            return []
        devices = self._reading.devices
        makes = {devices[n].name for n in like if n in devices}
        return [n for n in sorted(set(devices) - set(taken)) if devices[n].name in makes and self.usable(n)]

    def usable(self, number: int) -> bool:
        """Whether a device can be given to a new process, as far as is known."""
        if self._reading is None or self._kind != "rbln":
            return True
        npu = self._reading.devices.get(number)
        return npu is not None and not self._reading.holders(number) and not self._reading.alarms(npu)

    def _show(self, reading: Reading | None, specs: Mapping[str, tuple[ProcessSpec, int | None]]) -> None:
        if reading is None:
            for name in specs:
                self._board.update(name, npus=())
            self._board.set_cluster(spare_npus=())
            self._alarm({})
            return
        users = {c.of.pid for c in reading.contexts}
        alarms: dict[str, tuple[str, str, str]] = {}
        taken: set[int] = set()
        for name, (spec, main) in specs.items():
            mine = numbers(spec.device)
            taken.update(mine)
            tree = self._tree(name) if main is not None else frozenset()
            if main is not None:
                self._users.setdefault(name, set()).update(tree & users)
            npus = reading.of(mine, tree)
            self._board.update(name, npus=tuple(map(_coarse, npus)))
            for npu in npus:
                alarms |= {
                    f"{npu.device}:{k}": (name, text, _help(k, spec.role))
                    for k, text in reading.alarms(npu).items()
                }
            if mine and (lost := [n for n in mine if n not in reading.devices]):
                told = f"device {', '.join(map(str, lost))} is not listed by {reading.tool}"
                alarms[f"{name}:lost"] = (name, told, _help("lost", spec.role))
        spare = [npu for n, npu in sorted(reading.devices.items()) if n not in taken]
        self._board.set_cluster(spare_npus=tuple(map(_coarse, spare)))
        self._alarm(alarms)

    def forget(self, name: str) -> None:
        """A new life begins."""
        self._users.pop(name, None)

    def _alarm(self, wanted: Mapping[str, tuple[str, str, str]]) -> None:
        """`wanted`: key → (process, what is wrong, the console's action that helps)."""
        for key, (subject, text, action) in wanted.items():
            if key not in self._alarmed:
                self._board.log(subject, text, "error")
            self._board.raise_alarm(
                Alarm(
                    key=f"device:{key}",
                    subject=subject,
                    text=text,
                    since=time.time(),
                    severity="warning" if key.endswith(":hot") else "critical",
                    help=action,
                )
            )
        for key in self._alarmed - wanted.keys():
            self._board.end_alarm(f"device:{key}")
        self._alarmed = set(wanted)


def _help(what: str, role: Role) -> str:
    """Of a hot device the encoder may rest; one that hangs is begun anew; else the doctor looks at it."""
    if what == "hot" and role is Role.ENCODER:
        return "drain"
    return "restart" if what == "hangs" else "doctor"


def _coarse(npu: Npu) -> Npu:
    """Steps that are worth telling: 16 MiB, 1 W."""
    used = None if npu.memory_used is None else round(npu.memory_used / (16 * MIB)) * 16 * MIB
    power = None if npu.power_w is None else float(round(npu.power_w))
    return msgspec.structs.replace(npu, memory_used=used, power_w=power)

"""What an operator should know before it hurts: silence, crash loops, a filling queue, a filling disk.

Other alarms are raised where they are found out. All of them get a line in the history here, at their begin
and at their end.
"""

import asyncio
import shutil
import time
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from eccon.model import Alarm, Process, State
from eccon.supervisor.cluster import Cluster
from eccon.supervisor.proxylink import ProxyLinkError

__all__ = ["DISK_LOW", "Deaths", "Worries", "of_disk", "of_process", "of_queue", "silence"]

EVERY_S = 2.0
PREFIX = "worry:"
SAYS_WHY = ("stalled:", "dying:")
"""Alarms of others about a process that is stalled."""
LOOP_DEATHS = 3
LOOP_S = 300.0
"""So many deaths within so long are a crash loop."""
QUEUE_SHARE = 0.5
"""Of the proxy's queue: from here on it is filling."""
MIB = 2**20
DISK_LOW, DISK_OUT = 256 * MIB, 32 * MIB
"""Free bytes where logs and state lie."""


class Deaths(msgspec.Struct):
    """When a process died of itself, lately. Unix times."""

    at: deque[float] = msgspec.field(default_factory=deque)

    def note(self, process: Process, now: float) -> int:
        """Takes what is known of the process; how often it died within the last minutes."""
        last = process.exit
        if last is not None and not last.asked and (not self.at or last.at > self.at[-1]):
            self.at.append(last.at)
        while self.at and self.at[0] < now - LOOP_S:
            self.at.popleft()
        return len(self.at)


def silence(name: str) -> str:
    """The key of the alarm about a process that does not answer: who knows better why takes its place."""
    return f"{PREFIX}stalled:{name}"


def of_process(process: Process, deaths: int, now: float, *, told: bool = False) -> Alarm | None:
    """A process that was given up, does not answer any more, or dies again and again.

    `told`: another alarm says already why it is stalled.
    """
    if process.state is State.FAILED:
        text = f"is left alone: {process.reason or 'it died too often'}"
        return _alarm("failed", process.name, text, now, "start", critical=True)
    if process.state is State.STALLED and not told:
        text = f"does not serve: {process.reason or 'it is stalled'}"
        return _alarm("stalled", process.name, text, process.since, "restart", critical=True)
    if deaths >= LOOP_DEATHS:
        text = f"died {deaths} times within {LOOP_S / 60:.0f} minutes: {_how(process)}"
        return _alarm("loop", process.name, text, now, "logs", critical=True)
    return None


def of_queue(queued: int, limit: int, now: float) -> Alarm | None:
    """Requests that wait in the proxy, of so many that may."""
    if limit <= 0 or queued < max(1.0, QUEUE_SHARE * limit):
        return None
    text = f"{queued} requests wait for room, of {limit} that may; then clients get 429"
    return _alarm("queue", "proxy", text, now, "add")


def of_disk(free: int, where: str, now: float) -> Alarm | None:
    """Bytes left on the file system of logs and state."""
    if free >= DISK_LOW:
        return None
    text = f"the disk is filling: {free / MIB:.0f} MiB left for logs and state in {where}"
    return _alarm("disk", "cluster", text, now, "doctor", critical=free < DISK_OUT)


def _alarm(kind: str, subject: str, text: str, now: float, help_: str, *, critical: bool = False) -> Alarm:
    return Alarm(
        key=f"{PREFIX}{kind}:{subject}",
        subject=subject,
        text=text,
        since=now,
        severity="critical" if critical else "warning",
        help=help_,
    )


def _how(process: Process) -> str:
    if process.exit is None:
        return "it is not known how"
    if process.exit.signal is not None:
        return f"signal {process.exit.signal}"
    return f"exit code {process.exit.code}" if process.exit.code is not None else "it is not known how"


class Worries:
    """Looks every two seconds. `run` is its task."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._deaths: dict[str, Deaths] = {}
        self._alarms: dict[str, Alarm] = {}

    async def run(self) -> None:
        """The loop."""
        board = self.cluster.board
        while True:
            now = time.time()
            found = [*self._of_processes(now), *await self._of_queue(now), *await self._of_disk(now)]
            for alarm in found:
                board.raise_alarm(alarm)
            keys = {a.key for a in found}
            for alarm in board.alarms:
                if alarm.key.startswith(PREFIX) and alarm.key not in keys:
                    board.end_alarm(alarm.key)
            self._tell({a.key: a for a in board.alarms})
            await asyncio.sleep(EVERY_S)

    def _of_processes(self, now: float) -> Iterable[Alarm]:
        present = self.cluster.board.processes
        self._deaths = {p.name: self._deaths.get(p.name, Deaths()) for p in present}
        for process in present:
            deaths = self._deaths[process.name].note(process, now)
            told = any(
                a.subject == process.name and a.key.startswith(SAYS_WHY) for a in self.cluster.board.alarms
            )
            if alarm := of_process(process, deaths, now, told=told):
                yield alarm

    async def _of_queue(self, now: float) -> list[Alarm]:
        link = self.cluster.link
        queued = 0
        try:
            # Nothing waits in it while nothing is under way: then it need not be asked.
            if link.connected and self.cluster.board.cluster.inflight:
                queued = (await link.state()).queued
        except ProxyLinkError:
            queued = 0
        self.cluster.board.set_cluster(queued=queued)
        alarm = of_queue(queued, round(link.setting("queue")), now)
        return [alarm] if alarm else []

    async def _of_disk(self, now: float) -> list[Alarm]:
        where = self.cluster.paths.root
        try:
            free = (await asyncio.to_thread(shutil.disk_usage, where)).free
        except OSError:
            return []  # it is not there: others say so
        alarm = of_disk(free, str(where), now)
        return [alarm] if alarm else []

    def _tell(self, alarms: Mapping[str, Alarm]) -> None:
        """Begins and ends into the history; what was said there already is not said twice."""
        board = self.cluster.board
        said = {(e.subject, e.text) for e in board.events[-50:]}
        for key, alarm in alarms.items():
            if key not in self._alarms and (alarm.subject, alarm.text) not in said:
                board.log(
                    alarm.subject,
                    f"alarm: {alarm.text}",
                    "error" if alarm.severity == "critical" else "warning",
                )
        for key, alarm in self._alarms.items():
            if key not in alarms:
                board.log(alarm.subject, f"alarm over: {alarm.text}")
        self._alarms = dict(alarms)

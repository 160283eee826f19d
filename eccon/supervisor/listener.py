"""What the children tell: by their logs (connector events, milestones, announced deaths) and by /proc."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Literal

from eccon.model import Alarm, Role, State
from eccon.paths import ClusterPaths
from eccon.signals import guard, milestones
from eccon.signals.connector import ItemEvent, Notice, parse
from eccon.signals.tail import Tail
from eccon.signals.transfers import Transfers
from eccon.signals.usage import Usage
from eccon.supervisor.board import Board
from eccon.supervisor.logs import log_path
from eccon.supervisor.owner import Owner
from eccon.supervisor.store import Saved
from eccon.supervisor.traces import Traces

__all__ = ["Listener"]

READ_EVERY_S = 0.2
READ_SILENCE_EVERY_S = 0.5
SILENCE_S = 3.0
READ_BYTES = 2**19
"""At once: what is made of it must not keep the control API waiting."""
READS_MAX = 8
"""One after another, of one log, before the others have their turn."""
FIGURES_EVERY_S = 2.0
REMEMBER_EVERY_S = 5.0
BACK_BYTES = 256 * 1024
"""How far a new daemon reads back in the log of a process that it adopted."""
MIB = 2**20
HELPS = {"dying": "logs", "version": "doctor", "evicting": "logs"}
"""The action of the console that helps with what a log announces."""


class Listener:
    """Two tasks, `read_logs` and `take_figures`, over whatever owners there are.

    What the daemon before had read of the logs (`saved`) is read again for the traces, and not counted twice.
    """

    def __init__(self, paths: ClusterPaths, board: Board, traces: Traces, saved: Saved) -> None:
        self.paths = paths
        self.board = board
        self.traces = traces
        self.transfers = Transfers(saved.latencies)
        self._resume = dict(saved.positions)
        self.owners: dict[str, Owner] = {}
        self.on_dying: Callable[[str, str], None] = lambda _name, _why: None
        """A process's log says that it will exit."""
        self.on_counted: Callable[[], None] = lambda: None
        """Deliveries were counted that should be remembered."""
        self._remember_at = 0.0
        self._peers: dict[str, str] = {}
        """The PD's engine that each encoder is in contact with."""
        self._tails: dict[str, Tail] = {}
        self._usage = Usage()
        self._fresh: set[str] = set()
        """Encoders with deliveries since the last figures."""
        self._guarded: set[str] = set()
        """Processes whose connector tells its steps in events: those in its log are the same."""

    async def read_logs(self) -> None:
        """Reads what is new: soon when something is being said, less often in a silence."""
        heard_at = 0.0
        while True:
            for name, owner in list(self.owners.items()):
                if await self._read(name, owner):
                    heard_at = time.monotonic()
            for name in self._tails.keys() - self.owners.keys():
                self._tails.pop(name).close()
                self.transfers.forget(name)
            self._show_transfers()
            silent = time.monotonic() - heard_at > SILENCE_S
            await asyncio.sleep(READ_SILENCE_EVERY_S if silent else READ_EVERY_S)

    async def _read(self, name: str, owner: Owner) -> bool:
        """Whether there was anything."""
        if owner.spec.role is Role.PROXY:
            return False
        tail = self._tails.get(name) or self._open(name, owner)
        lost, heard = tail.lost, False
        for _ in range(READS_MAX):
            if not (lines := tail.read(READ_BYTES)):
                break
            heard = True
            self._take(name, owner, lines, old=False)
            await asyncio.sleep(0)
        if tail.lost != lost:
            self.board.log(
                name, "its log grew faster than it could be read; some lines went unseen", "warning"
            )
        return heard

    def _open(self, name: str, owner: Owner) -> Tail:
        """Where the daemon before stopped reading; else, of an adopted process, what it said a moment ago."""
        path = log_path(self.paths, name)
        resume = self._resume.pop(name, None)
        back = BACK_BYTES if owner.life else 0 if path.exists() else None
        tail = self._tails[name] = Tail(path, back=back, resume=resume)
        self._fresh.add(name)
        if owner.life and resume is not None and (earlier := tail.earlier(BACK_BYTES)):
            self._take(name, owner, earlier, old=True)
        return tail

    def _take(self, name: str, owner: Owner, lines: bytes, *, old: bool) -> None:
        # What stands before the shim's first line of this life was said by an earlier one.
        now_living = lines[max(0, lines.rfind(b"eccon: started pid ")) :]
        if owner.state in {State.STARTING, State.LOADING}:
            for step in milestones.steps(now_living):
                owner.milestone(step)
        if (level := guard.level(now_living)) is not None:
            self.board.update(name, guard=level)
        for event in parse(lines):
            if isinstance(event, ItemEvent) and name not in self._guarded:
                self._item(name, event, old=old)
        for event in parse(now_living):
            if isinstance(event, Notice):
                self._notice(name, owner, event, old=old)

    def _item(self, name: str, event: ItemEvent, *, old: bool) -> None:
        delivery = self.transfers.feed(name, event, old=old)
        self._fresh.add(name)
        if delivery:
            self._fresh.add(delivery.encoder)
            self.traces.deliver(delivery)

    def guard_event(self, event: guard.Event) -> None:
        """A guarded connector tells a step of an item."""
        owner = self.owners.get(event.who)
        if owner is None:
            return
        if event.who not in self._guarded:
            self._guarded.add(event.who)
        if event.level:
            self.board.update(event.who, guard=event.level)
        if (step := guard.item(event)) is not None:
            self._item(event.who, step, old=False)

    def guard_lost(self, count: int) -> None:
        """Events found no room: `count` since the daemon's start."""
        before = self.board.cluster.lost_guard_events
        self.board.set_cluster(lost_guard_events=count)
        if len(str(count)) > len(str(before)) or not before:  # the first, then each tenfold
            text = f"{count} events of the guarded connectors found no room: figures of transfers lack them"
            self.board.log("cluster", text, "warning")

    def _notice(self, name: str, owner: Owner, notice: Notice, *, old: bool) -> None:
        if owner.life is None:
            return
        key = f"{notice.key}:{owner.life.id}"
        if any(a.key == key for a in self.board.alarms):
            return
        if notice.severity == "info":
            self._contact(name, notice, old=old)
            return
        if old and notice.key == "dying":
            # It was looked at then, and lives.
            return
        if not old:
            self.board.log(name, notice.text, "error" if notice.severity == "critical" else "warning")
        self.board.raise_alarm(
            Alarm(
                key=key,
                subject=name,
                text=notice.text,
                since=time.time(),
                severity=notice.severity,
                help=HELPS.get(notice.key, ""),
            )
        )
        if notice.key == "dying":
            self.on_dying(name, notice.text)

    def _contact(self, name: str, notice: Notice, *, old: bool) -> None:
        """An encoder heard of a PD's engine for the first time: of the first one, or of a new one."""
        before, self._peers[name] = self._peers.get(name), notice.peer
        if not old and before != notice.peer:
            self.board.log(name, notice.text if before is None else "a new PD took up contact")

    def _show_transfers(self) -> None:
        for name in self._fresh:
            self.board.update(name, connector=self.transfers.counts(name))
            if transfer := self.transfers.of(name):
                self.board.update(name, transfer=transfer)
        if self._fresh:
            self._fresh.clear()
            if overall := self.transfers.overall():
                source: Literal["log", "guard"] = "guard" if self._guarded else "log"
                self.board.set_cluster(transfer=overall, transfer_source=source)
            if time.monotonic() > self._remember_at:
                self._remember_at = time.monotonic() + REMEMBER_EVERY_S
                self.on_counted()

    def remembered(self) -> dict[str, tuple[int, int]]:
        """Up to where each log was read."""
        positions = {name: tail.position for name, tail in self._tails.items()}
        return self._resume | {name: at for name, at in positions.items() if at is not None}

    async def take_figures(self) -> None:
        """CPU, memory and lost log lines, every two seconds."""
        while True:
            alive = {n: o.life for n, o in self.owners.items() if o.life and not o.life.died}
            mains = {n: life.pid for n, life in alive.items() if life.pid}
            keepers = {n: life.shim.who.pid for n, life in alive.items() if not life.shim.ended.is_set()}
            figures = await asyncio.to_thread(self._usage.sample, mains, keepers)
            for name, f in figures.items():
                owner = self.owners.get(name)
                if owner and owner.life and owner.life.pid == mains[name]:
                    rss = round(f.rss_bytes / (4 * MIB)) * 4 * MIB
                    self.board.update(name, cpu_percent=f.cpu_percent, rss_bytes=rss)
            self._count_lost()
            await asyncio.sleep(FIGURES_EVERY_S)

    def tree(self, name: str) -> frozenset[int]:
        """Pids of a process and its tree, as far as they are known by now; it costs nothing to ask."""
        owner = self.owners.get(name)
        main = {owner.life.pid} if owner and owner.life and owner.life.pid else set()
        return self._usage.pids(name) | main

    def _count_lost(self) -> None:
        dropped = sum(o.life.dropped for o in self.owners.values() if o.life)
        dropped += sum(t.lost for t in self._tails.values())
        if dropped > self.board.cluster.lost_log_lines:
            self.board.raise_alarm(
                Alarm(
                    key="lost-lines",
                    subject="cluster",
                    text="log lines are being lost: is the disk full?",
                    since=time.time(),
                    help="doctor",
                )
            )
        else:
            self.board.end_alarm("lost-lines")
        self.board.set_cluster(lost_log_lines=dropped)

    def end_alarms_of(self, name: str) -> None:
        """A new life of a process: what was announced in the old one is past."""
        self._peers.pop(name, None)
        self._guarded.discard(name)
        self.board.update(name, guard="")
        if name in self.owners and self.owners[name].spec.role is Role.PD:
            self.transfers.pd_ended()
        for alarm in self.board.alarms:
            with contextlib.suppress(ValueError):
                kind, life = alarm.key.split(":", 1)
                if life.rpartition("@")[0] == name and kind:
                    self.board.end_alarm(alarm.key)

    def close(self) -> None:
        """Lets go of the files."""
        for tail in self._tails.values():
            tail.close()

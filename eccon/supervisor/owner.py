"""One task for one process: brings it to what is wanted, one step at a time.

Commands only say what is wanted and wake the task, so that they are idempotent and any number of them ends in
the last state asked for. A restart names the life that it ends: asked for twice it is done once.
"""

import asyncio
import contextlib
import time
from typing import Literal

import msgspec

from eccon.launch import ProcessSpec
from eccon.model import Exit, Process, State
from eccon.signals.milestones import Step
from eccon.supervisor import drain, identity, lives, logs, ports
from eccon.supervisor.backoff import Backoff
from eccon.supervisor.context import Context
from eccon.supervisor.health import HealthWatch
from eccon.supervisor.progress import StartProgress
from eccon.supervisor.secrets import shown, shown_env
from eccon.supervisor.waiting import happened

__all__ = ["ASIDE", "Owner"]

BLOCKED_LOOK_S = 3.0
"""How often a held port is looked at again."""
DEVICE_LOOK_S = 0.5
DEVICE_LATE_S = 60.0
"""A device that has not let go of an ended process by then needs an operator."""
LAST_LINES = 20
ASIDE = "kept aside: no items until it is resumed"
NOTHING_RUNS = dict.fromkeys(("pid", "started_at", "milestone", "cpu_percent", "rss_bytes", "engine"))


class Owner:
    """Owns the process of `spec`; nobody else starts or stops it. `run` is its task."""

    def __init__(self, context: Context, spec: ProcessSpec, life: lives.Life | None = None) -> None:
        self.context = context
        self.spec = spec
        self.life = life
        self.wanted = False
        self.leaving = False
        """It is to end for good: an encoder that was removed."""
        self.backoff = Backoff()
        self.failed = ""
        """Why it is given up; empty while it is not."""
        self.retry_at = 0.0
        self.restarts = 0
        self.lived = life is not None
        self.ready_at: float | None = None
        """Unix time of becoming ready in this life."""
        self.doom = ""
        """Why this life must end though it is wanted: it did not become ready in time."""
        self.dying_since: float | None = None
        """When its log said that it will exit, by the monotonic clock."""
        self._no_room = False
        """Whether the disk keeps it from being started: that is said once."""
        self.aside = False
        """An operator keeps it without items, until told otherwise."""
        self.force = False
        self.no_drain = False
        self._restart_of = ""
        self._pids: set[int] = set()
        """Its tree, when it was told to end."""
        self._waker = asyncio.Event()
        self._progress = StartProgress(context.history, spec.role, adopted=life is not None)
        process = Process(
            name=spec.name, role=spec.role, state=State.STOPPED, since=time.time(), wanted=False
        )
        context.board.put(process)
        self.describe()

    @property
    def name(self) -> str:
        """Of the process."""
        return self.spec.name

    @property
    def process(self) -> Process:
        """As the board shows it."""
        process = self.context.board.process(self.name)
        assert process is not None  # noqa: S101  put there by the constructor, removed after the task
        return process

    @property
    def state(self) -> State:
        """As the board shows it."""
        return self.process.state

    @property
    def settled(self) -> bool:
        """Whether nothing more will happen by itself."""
        if self._restart_of or self.leaving:
            return False
        if not self.wanted:
            return self.state is State.STOPPED
        return self.state in {State.READY, State.FAILED, State.BLOCKED}

    @property
    def settled_in_life(self) -> bool:
        """Whether nobody has asked yet for its present life to end."""
        return self.wanted and not self.leaving and not self._restart_of

    def describe(self) -> None:
        """What the topology says of it, onto the board."""
        s = self.spec
        self.context.board.update(
            self.name,
            device=s.device,
            port=s.port,
            url=s.url,
            argv=shown(s.argv),
            env=shown_env(s.env),
            wanted=self.wanted,
        )

    # Commands. Each returns at once.

    def start(self) -> None:
        """It is wanted; a process that was given up is tried afresh."""
        self.wanted, self.no_drain, self.force = True, False, False
        if self.life is None:
            self.backoff.reset()
            self.failed, self.retry_at = "", 0.0
        self.wake()

    def stop(self, *, force: bool = False, no_drain: bool = False) -> None:
        """It is not wanted."""
        self.wanted, self._restart_of = False, ""
        self.force, self.no_drain = force, no_drain
        self.wake()

    def restart(self, *, force: bool = False) -> None:
        """Its present life ends, and it is wanted."""
        if self.life is not None and not self.life.died:
            self._restart_of = self.life.id
        self.start()
        self.force = force

    def remove(self, *, force: bool = False) -> None:
        """It is not wanted, and its task ends when it is stopped."""
        self.leaving = True
        self.stop(force=force)

    def wake(self) -> None:
        """Something happened that the task should look at."""
        self.context.board.update(self.name, wanted=self.wanted)
        self._waker.set()

    def milestone(self, step: Step) -> None:
        """Its log showed a step of its start."""
        if self.life is None or self.state not in {State.STARTING, State.LOADING}:
            return
        if self._progress.reach(step, self.life.started_at):
            self.context.board.update(self.name, milestones=self._progress.milestones)
            self._set(State.LOADING, step.text)
            self.estimate()

    def estimate(self) -> None:
        """The milestone with the seconds that are left, onto the board."""
        if self.life is not None and self.state in {State.STARTING, State.LOADING}:
            self.context.board.update(self.name, milestone=self._progress.estimate(self.life.started_at))

    # The task.

    async def run(self) -> None:
        """Until the process has left, or the task is cancelled (then the process goes on)."""
        try:
            while not (self.leaving and self.life is None):
                await self._next()
        finally:
            if self.life is not None:
                self.life.close()

    async def _next(self) -> None:
        """One step towards what is wanted."""
        if self.life is not None:
            await self._live(self.life)
            return
        self._restart_of = ""
        wait = self.retry_at - time.time()
        if not self.wanted:
            by = end.signal if self.state is State.STOPPING and (end := self.process.exit) else None
            self._set(State.STOPPED, "", "stopped" if by is None else f"stopped by signal {by}")
            await self._woken()
        elif self.failed:
            self._set(State.FAILED, self.failed)
            await self._woken()
        elif wait > 0:
            self._set(State.BACKOFF, self.process.reason)
            await self._woken(wait)
        elif reason := self.context.waits_for(self.name):
            self._set(State.WAITING, reason)
            await self._woken()
        elif obstacle := await self.obstacle():
            self._set(State.BLOCKED, obstacle)
            await self._woken(BLOCKED_LOOK_S)
        else:
            await self._begin()

    async def obstacle(self) -> str:
        """Who holds one of its ports or devices; empty when all are free. Must not be asked while it runs."""
        held = await asyncio.to_thread(self._port_holder)
        return held or "; ".join(await self.context.devices.troubles(self.spec))

    def _port_holder(self) -> str:
        for port in self.spec.ports:
            host = self.spec.host if port == self.spec.port else ""
            if holder := ports.holder(port, host):
                return str(holder)
        return ""

    async def _begin(self) -> None:
        board = self.context.board
        if not self._no_room:
            self.restarts += self.lived
            self.lived = True
            self._set(State.STARTING, "")
        board.update(self.name, restarts=self.restarts, retry_at=None, last_lines=(), milestone=None)
        board.update(self.name, milestones=(), connector=None)
        try:
            self.life = await lives.begin(self.context.topology, self.context.paths, self.spec)
        except lives.LifeError as e:
            if e.no_room:
                # It did not die: it is started as soon as there is room.
                self._set(State.BLOCKED, str(e))
                self._no_room = True
                await self._woken(BLOCKED_LOOK_S)
                return
            board.log(self.name, str(e), "error")
            self._count_death(str(e))
            return
        self._no_room = False
        self._set(State.STARTING, "")
        self._progress.begin()
        self.ready_at, self.doom, self.dying_since = None, "", None
        self.context.devices.forget(self.name)
        self._pids = set()

    async def _live(self, life: lives.Life) -> None:
        """From start or adoption to the end of the whole tree."""
        life.on_end(self._waker.set)
        self.context.board.update(self.name, pid=life.pid, started_at=life.started_at)
        health = HealthWatch(self, life)
        watch = asyncio.create_task(health.run(), name=f"health of {self.name}")
        asked = ""
        try:
            while not life.died:
                await self._keep_shim(life)
                if self._must_end(life) and (asked := await self._wind_down(life)):
                    break
                await self._woken()
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        await self._bury(life, asked)

    def _must_end(self, life: lives.Life) -> bool:
        return not self.wanted or self.leaving or self._restart_of == life.id or bool(self.doom)

    async def _wind_down(self, life: lives.Life) -> Literal["", "stop", "doom"]:
        """Drains and stops. Empty when it is wanted again meanwhile, or died before it was told to stop."""
        if not self.no_drain and not self.doom and self.state in {State.READY, State.STALLED}:
            go_on = await drain.drain(self, life, lambda: self._must_end(life), self._woken)
            if not go_on:
                return ""
        self._set(State.STOPPING, f"ends within {self.context.topology.supervisor.stop_grace_s:g} s")
        await self._keep_shim(life)
        if self.spec.device and (pid := life.pid):
            self._pids = await asyncio.to_thread(identity.tree, pid)
        life.stop()
        return "doom" if self.doom else "stop"

    async def _bury(self, life: lives.Life, asked: str) -> None:
        """Waits until nothing of it lives, and records how it ended."""
        if not asked:
            self._set(State.STOPPING, "died; what it left behind is being ended")
        kill_at = time.time() + self.context.topology.supervisor.stop_grace_s
        forced = False
        while not life.over:
            await self._keep_shim(life)
            if asked and self.force and not forced:
                life.kill()
                forced = True
            if stuck := life.unkillable:
                self._set(State.BLOCKED, f"pid {', '.join(map(str, stuck))} cannot be killed")
            elif asked and (left := round(kill_at - time.time())) >= 0:
                self._set(State.STOPPING, f"killing it in {left} s")
            await self._woken(1.0)
        await self._devices_are_free()
        end = life.exit() or Exit(at=time.time())
        end = msgspec.structs.replace(end, asked=asked == "stop")
        life.close()
        self.life = None
        board = self.context.board
        board.update(self.name, exit=end, **NOTHING_RUNS)
        if asked == "stop":
            return
        how = self.doom or describe_exit(end)
        lines = await asyncio.to_thread(logs.last_lines, self.context.paths, self.name, LAST_LINES)
        board.update(self.name, last_lines=tuple(lines))
        board.log(self.name, how, "error")
        self._count_death(how)

    async def _devices_are_free(self) -> None:
        """A device gives up an ended process's context when it has tidied up; before, it takes no new one."""
        begun = time.monotonic()
        while held := await self.context.devices.held_after(self.name, self.spec, self._pids):
            late = time.monotonic() - begun > DEVICE_LATE_S
            self._set(State.BLOCKED if late else State.STOPPING, held)
            await self._woken(DEVICE_LOOK_S)

    async def _keep_shim(self, life: lives.Life) -> None:
        """A killed shim is replaced, so that the log is drained on and the end is seen."""
        if not life.shim.ended.is_set() or life.over:
            return
        try:
            await life.revive_shim(lives.environment(self.spec))
        except (OSError, lives.LifeError) as e:
            self.context.board.log(self.name, f"its shim was killed and cannot be replaced: {e}", "error")
            await asyncio.sleep(1)
            return
        if not life.died:
            self.context.board.log(self.name, "its shim was killed; a new one took over", "warning")
        life.on_end(self._waker.set)
        if self.state is State.STOPPING:
            life.stop()

    def _count_death(self, how: str) -> None:
        policy = self.context.topology.supervisor
        healthy = time.time() - self.ready_at if self.ready_at else 0.0
        self.ready_at = None
        wait = self.backoff.died(policy, healthy)
        if not self.wanted:
            return
        if wait is None:
            self.failed = f"{how}; given up after {self.backoff.deaths} deaths in a row"
            self._set(State.FAILED, self.failed)
        else:
            self.retry_at = time.time() + wait
            self.context.board.update(self.name, retry_at=self.retry_at)
            self._set(State.BACKOFF, how)

    async def became_ready(self, life: lives.Life) -> None:
        """Its health watch found it ready, for the first time in this life or again."""
        first = self.ready_at is None
        now = time.time()
        if first:
            self.ready_at = now
        self.dying_since = None
        self.context.board.update(self.name, milestone=None)
        told = self._progress.ready(now - life.started_at) if first else ""
        self._set(State.READY, ASIDE if self.aside else "", told)
        await self.context.became_ready(self.name)

    def set_state(self, state: State, reason: str) -> None:
        """For its health watch and drain: they run within this task's life."""
        self._set(state, reason)

    def _set(self, state: State, reason: str, word: str = "") -> None:
        """`word` says more of the state than its name does, in the history."""
        before = self.process
        if before.state is state:
            self.context.board.update(self.name, reason=reason)
            return
        self.context.board.update(self.name, state=state, reason=reason, since=time.time())
        told = f"{before.state.value} → {word or state.value}" + (f": {reason}" if reason else "")
        bad = state in {State.FAILED, State.BLOCKED, State.STALLED, State.BACKOFF}
        self.context.board.log(self.name, told, "warning" if bad else "info")
        self.context.stirred(self.name)

    async def _woken(self, timeout: float | None = None) -> None:
        """Until something happened, at most `timeout` seconds."""
        await happened(self._waker, timeout)
        self._waker.clear()


def describe_exit(end: Exit) -> str:
    """How it ended, in words."""
    if end.signal is not None:
        return f"killed by signal {end.signal}"
    if end.code is None:
        return "died; its exit status is unknown"
    return f"exited with code {end.code}" + (" without being asked" if end.code == 0 else "")

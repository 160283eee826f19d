"""All processes of one cluster: who may start when, and what the commands mean."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from eccon import launch
from eccon.config import Topology
from eccon.launch import EncoderSlot, NoRoomError
from eccon.model import Role, State
from eccon.paths import ClusterPaths
from eccon.supervisor import lives, memory
from eccon.supervisor.board import Board
from eccon.supervisor.context import Context
from eccon.supervisor.devices import DeviceWatch
from eccon.supervisor.external import External
from eccon.supervisor.listener import Listener
from eccon.supervisor.owner import Owner
from eccon.supervisor.pd import Pd
from eccon.supervisor.probe import Prober
from eccon.supervisor.proxylink import ProxyLink, ProxyLinkError
from eccon.supervisor.rotation import Rotation
from eccon.supervisor.store import Remembered, Saved, Store
from eccon.supervisor.verdict import judge

__all__ = ["Cluster", "RefusedError"]

log = logging.getLogger(__name__)


class RefusedError(Exception):
    """A command that cannot be done; `status` as in HTTP."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """Owners by name, in display order: PD, proxy, encoders."""

    def __init__(
        self,
        topology: Topology,
        paths: ClusterPaths,
        board: Board,
        prober: Prober,
        link: ProxyLink,
        listener: Listener,
        saved: Saved,
    ) -> None:
        self.topology = topology
        self.paths = paths
        self.board = board
        self.link = link
        self.listener = listener
        self.wanted = saved.wanted
        self.ending = False
        """Whether the daemon is about to end: nothing is started any more."""
        self.owners: dict[str, Owner] = {}
        self.slots: dict[str, EncoderSlot] = {}
        self.pd = Pd(self.owners)
        self.store = Store(paths.state_file, self._gather, self._store_trouble)
        self.context = Context(
            topology=topology,
            paths=paths,
            board=board,
            prober=prober,
            proxy=link,
            history=saved.history,
            devices=DeviceWatch(board, topology.devices.kind, listener.tree),
            waits_for=self.pd.waits_for,
            stirred=self._stirred,
            became_ready=self._became_ready,
            flush_pd=self.pd.flush,
            pd_lives=self.pd.lives,
            tree=listener.tree,
            pause_media=self._pause_media,
        )
        self.rotation = Rotation(board, link, self.owners, self.slots)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._down: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.on_stir: Callable[[], None] = lambda: None
        listener.owners = self.owners
        listener.on_dying = self._dying
        listener.on_counted = self.store.changed
        self._build(saved)

    def _build(self, saved: Saved) -> None:
        found = lives.find(self.paths)
        slots = saved.slots if saved.slots is not None else launch.slots(self.topology)
        self.slots.update((slot.name, slot) for slot in slots)
        specs = [
            launch.pd(self.topology, self.paths),
            launch.proxy(self.topology, self.paths, self._proxy_urls()),
            *(launch.encoder(self.topology, self.paths, slot) for slot in self.slots.values()),
        ]
        for spec in specs:
            life = found.pop(spec.name, None)
            owner = self.owners[spec.name] = self.new_owner(spec, life)
            memory.recall(owner, saved.processes.get(spec.name, Remembered(wanted=self.wanted)))
        for name, life in found.items():
            # A process that the topology no longer has: it is ended, and then forgotten.
            slot = EncoderSlot(int(name.rpartition("-")[2]), 0) if name.startswith("encoder-") else None
            if slot is None or life.over:
                life.close()
                continue
            owner = self.owners[name] = self.new_owner(launch.encoder(self.topology, self.paths, slot), life)
            memory.recall(owner, Remembered())
            owner.remove()

    def new_owner(self, spec: launch.ProcessSpec, life: lives.Life | None = None) -> Owner:
        """Of one of our processes, or of one that others start."""
        if not spec.external:
            return Owner(self.context, spec, life)
        if life is not None:
            # It was ours under another configuration; whoever made it external is to end it.
            self.board.log(spec.name, f"is external now; pid {life.pid} of before goes on", "warning")
            life.close()
        return External(self.context, spec)

    async def watch_devices(self) -> None:
        """Figures of the host's devices, for as long as the task lives."""
        await self.context.devices.run(
            lambda: {
                o.name: (o.spec, o.life.pid if o.life and not o.life.died else None)
                for o in self.owners.values()
            }
        )

    def start(self) -> None:
        """Starts the owners' tasks: what should run is started or adopted."""
        for owner in self.owners.values():
            self.spawn(owner)
        self.judge()

    async def close(self) -> None:
        """Ends the tasks. The processes go on."""
        tasks = [*self._tasks.values(), *self._background, *([self._down] if self._down else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Commands.

    async def up(self, *, partial: bool = False) -> None:
        """Everything is to run. With `partial` a process whose port or device is taken is blocked.

        Raises:
            RefusedError: a port or device is held by a stranger; nothing was started.
        """
        idle = [o for o in self.owners.values() if o.life is None]
        held = await asyncio.gather(*(o.obstacle() for o in idle))
        faults = [f"{o.name}: {reason}" for o, reason in zip(idle, held, strict=True) if reason]
        if faults and not partial:
            raise RefusedError("\n".join(faults))
        self.stop_going_down()
        self.want(True)
        for owner in self.owners.values():
            if not owner.leaving:
                owner.start()

    def down(self) -> "asyncio.Task[None]":
        """Everything ends: the proxy first, so that it can let its requests end, then the rest together."""
        self.want(False)
        if self._down is None or self._down.done():
            self._down = asyncio.create_task(self._go_down(), name="down")
        return self._down

    async def _go_down(self) -> None:
        proxy = self.owners["proxy"]
        rest = [o for o in self.owners.values() if o is not proxy]
        for owner in rest:
            # What waits or is in back-off must not start meanwhile.
            if owner.life is None and not owner.spec.external:
                owner.stop(no_drain=True)
        proxy.stop(no_drain=True)
        await self.board.until(
            lambda: proxy.state is State.STOPPED, self.topology.supervisor.stop_grace_s + 3
        )
        ours = [o for o in rest if not o.spec.external]
        for owner in ours:
            owner.stop(no_drain=True)
        await self.board.until(lambda: all(o.state is State.STOPPED for o in (proxy, *ours)), None)

    def stop_going_down(self) -> None:
        """A command that wants something up overrides a `down` that is under way.

        Raises:
            RefusedError: the daemon is ending; that cannot be overridden.
        """
        if self.ending:
            msg = "the cluster is being shut down"
            raise RefusedError(msg)
        if self._down is not None:
            self._down.cancel()
            self._down = None

    def begin(self, name: str) -> Owner:
        """One process is to run."""
        owner = self.ours(name)
        self.stop_going_down()
        self.want(True)
        owner.start()
        return owner

    def stop(self, name: str, *, force: bool = False) -> Owner:
        """One process is to stop, drained first."""
        owner = self.ours(name)
        owner.stop(force=force)
        return owner

    def restart(self, name: str, *, force: bool = False) -> Owner:
        """One process's present life is to end, and a new one to begin."""
        owner = self.ours(name)
        self.stop_going_down()
        self.want(True)
        self.board.log(name, "restart asked for" + (" with force" if force else ""))
        owner.restart(force=force)
        return owner

    async def set_aside(self, name: str, *, now: bool = False) -> Owner:
        """An encoder, ours or not, is drained and gets no items until `resume`."""
        owner = self._encoder(name)
        with contextlib.suppress(ProxyLinkError):
            await self.rotation.set_aside(owner, now=now)
        self.store.changed()
        return owner

    async def resume(self, name: str) -> Owner:
        """An encoder that was set aside gets items again."""
        owner = self._encoder(name)
        with contextlib.suppress(ProxyLinkError):
            await self.rotation.resume(owner)
        self.store.changed()
        return owner

    def _encoder(self, name: str) -> Owner:
        owner = self.owner(name)
        if owner.spec.role is not Role.ENCODER:
            msg = f"{name} is no encoder; only encoders are drained and resumed"
            raise RefusedError(msg)
        return owner

    def ours(self, name: str) -> Owner:
        """The owner of that name, of a process that is started here.

        Raises:
            RefusedError: there is none, or it is external.
        """
        owner = self.owner(name)
        if owner.spec.external:
            msg = (
                f"{name} is external: it was not started here, and is neither stopped nor restarted from here"
            )
            raise RefusedError(msg)
        return owner

    def owner(self, name: str) -> Owner:
        """The owner of that name.

        Raises:
            RefusedError: there is none.
        """
        owner = self.owners.get(name)
        if owner is None:
            msg = f"no process is called {name!r}; there are {', '.join(self.owners)}"
            raise RefusedError(msg, 404)
        return owner

    # What owners ask and tell.

    def spec(self, name: str) -> launch.ProcessSpec:
        """What starts it, by the present topology."""
        if name == "proxy":
            return launch.proxy(self.topology, self.paths, self._proxy_urls())
        if name == "pd":
            return launch.pd(self.topology, self.paths)
        return launch.encoder(self.topology, self.paths, self.slots[name])

    def _proxy_urls(self) -> list[str]:
        """Of the encoders whose ids the proxy would give itself: those after a gap join by its admin API."""
        urls = []
        for i, slot in enumerate(sorted(self.slots.values(), key=lambda s: s.index)):
            if slot.index != i:
                break
            urls.append(launch.encoder(self.topology, self.paths, slot).url)
        return urls

    def slots_changed(self) -> None:
        """Encoders joined or left: what the proxy is started with is another, and whether there is room."""
        self.owners["proxy"].spec = self.spec("proxy")
        self.owners["proxy"].describe()
        with contextlib.suppress(NoRoomError):
            launch.next_slot(
                self.topology, tuple(self.slots.values()), lambda _: True, more_devices=self.spare_devices()
            )
            self.board.set_cluster(can_add=True)
            self.store.changed()
            return
        self.board.set_cluster(can_add=False)
        self.store.changed()

    def spare_devices(self) -> list[int]:
        """Devices of the host that no process of the topology has and nobody uses, fit for an encoder."""
        listed = {*self.topology.pd.devices, *self.topology.encoders.devices}
        return self.context.devices.free(listed, self.topology.encoders.devices)

    def _stirred(self, name: str) -> None:
        owner = self.owners.get(name)
        if owner and owner.state is State.STARTING:
            self.listener.end_alarms_of(name)
        if name == "pd":
            if owner and owner.state not in {State.READY, State.STALLED, State.DRAINING}:
                self.listener.transfers.pd_ended()
            for other in self.owners.values():
                if other.state is State.WAITING:
                    other.wake()
        self.store.changed()
        self.judge()
        self.on_stir()

    async def _became_ready(self, name: str) -> None:
        if name == "pd":
            self.rotation.paused = ""
            self.rotation.renew_encoders(self.topology, self.pd.started_at(self.context))
        if life := self.owners[name].life:
            self.board.end_alarm(f"dying:{life.id}")
        await self.link.reconcile()

    def serves(self, name: str) -> bool:
        """Whether an encoder is ready, and the proxy sends to it."""
        return self.rotation.serves(name)

    async def _pause_media(self, reason: str, now: bool) -> None:
        await self.rotation.pause_media(reason, now)

    def _dying(self, name: str, why: str) -> None:
        """A log line announced a death: do not wait until it is seen."""
        owner = self.owners[name]
        if owner.state not in {State.READY, State.STALLED}:
            return
        owner.dying_since = time.monotonic()
        owner.set_state(State.STALLED, why)
        if owner.spec.role is Role.PD:
            self.in_background(self._pause_media(why, True))

    def in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs `work` beside everything else, and ends it with the daemon."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # The tasks, and what is remembered.

    def spawn(self, owner: Owner) -> None:
        """Starts an owner's task."""
        self._tasks[owner.name] = asyncio.create_task(self._run(owner), name=f"owner of {owner.name}")

    async def _run(self, owner: Owner) -> None:
        while True:
            try:
                await owner.run()
            except Exception as e:  # one owner's fault must not end the others
                log.exception("owner of %s", owner.name)
                self.board.log(owner.name, f"supervising it failed ({e}); it is taken up again", "error")
                await asyncio.sleep(1)
                owner.life = lives.find(self.paths).get(owner.name)
                continue
            break
        with contextlib.suppress(ProxyLinkError):
            await self.link.leave(owner.name)
        self.board.log(owner.name, "removed")
        self.owners.pop(owner.name, None)
        self.slots.pop(owner.name, None)
        self._tasks.pop(owner.name, None)
        self.board.remove(owner.name)
        self.slots_changed()

    def want(self, wanted: bool) -> None:
        """Whether `up` is in force."""
        self.wanted = wanted
        self.board.set_cluster(wanted=wanted)
        self.store.changed()
        self.judge()

    def judge(self) -> None:
        """The cluster's health anew, onto the board."""
        wanted = {o.name for o in self.owners.values() if o.wanted}
        states = {o.name: o.state for o in self.owners.values()}
        external = {o.name for o in self.owners.values() if o.spec.external}
        health, reason = judge(states, wanted, set(self.slots), self.rotation.not_sent_to(), external)
        self.board.set_cluster(health=health, reason=reason, wanted=self.wanted)

    def _gather(self) -> Saved:
        return Saved(
            wanted=self.wanted,
            config_path=str(self.topology.path),
            slots=list(self.slots.values()),
            processes=memory.remembered(self.owners.values()),
            history=self.context.history,
            events=list(self.board.events)[-200:],
            latencies=self.listener.transfers.latencies,
            positions=self.listener.remembered(),
        )

    def _store_trouble(self, trouble: str) -> None:
        if trouble:
            self.board.log("cluster", trouble, "error")
        else:
            self.board.log("cluster", f"{self.paths.state_file} is written again")

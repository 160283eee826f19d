"""Changes to a running cluster's shape: encoders come, go, are renewed; the configuration is read again."""

import asyncio
from collections.abc import Iterable

from eccon import config, launch
from eccon.config import Topology
from eccon.launch import EncoderSlot, NoRoomError
from eccon.model import Role, State
from eccon.supervisor import ports
from eccon.supervisor.cluster import Cluster, RefusedError
from eccon.supervisor.owner import Owner

__all__ = ["Shape"]

CAPACITY_S = 120.0
"""How long a rolling restart waits for encoders that are out for another reason."""


class Shape:
    """Commands on one cluster's shape; they return when accepted."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._one_at_a_time = asyncio.Lock()
        self._rolling: asyncio.Task[None] | None = None

    async def add(self) -> Owner:
        """One more encoder, on the next free device and port.

        Raises:
            RefusedError: there is none, or the cluster is down.
        """
        c = self.cluster
        if not c.wanted or c.ending:
            msg = "the cluster is down; `up` first"
            raise RefusedError(msg)
        async with self._one_at_a_time:
            taken = {**c.slots, **{n: _slot_of(o) for n, o in c.owners.items() if o.leaving}}
            await c.context.devices.look(newest=True)
            try:
                slot = await asyncio.to_thread(
                    launch.next_slot,
                    c.topology,
                    tuple(taken.values()),
                    ports.is_free,
                    c.context.devices.usable,
                    c.spare_devices(),
                )
            except NoRoomError as e:
                raise RefusedError(str(e)) from e
            owner = self._new(slot)
        chosen = slot.device is not None and slot.device not in c.topology.encoders.devices
        c.board.log(owner.name, "added" + (f" on device {slot.device}, which nobody uses" if chosen else ""))
        owner.start()
        return owner

    def remove(self, name: str, *, force: bool = False) -> Owner:
        """An encoder is drained, stopped and forgotten.

        Raises:
            RefusedError: it is not an encoder.
        """
        owner = self.cluster.ours(name)
        if owner.spec.role is not Role.ENCODER:
            msg = f"{name} is no encoder; only encoders can be removed"
            raise RefusedError(msg)
        owner.remove(force=force)
        return owner

    async def scale(self, count: int) -> None:
        """Encoders are added, or the highest ones of ours removed, until there are `count`.

        Raises:
            RefusedError: as `add`, those added before stay; or more than `count` are external.
        """
        c = self.cluster
        staying = [n for n in c.slots if not c.owners[n].leaving]
        ours = sorted((n for n in staying if not c.owners[n].spec.external), key=lambda n: c.slots[n].index)
        if (external := len(staying) - len(ours)) > count:
            msg = f"{external} encoders are external and stay: there cannot be only {count}"
            raise RefusedError(msg)
        for name in ours[count - external :]:
            self.remove(name)
        for _ in range(count - len(staying)):
            await self.add()

    def roll(self, names: Iterable[str] | None = None) -> "asyncio.Task[None]":
        """Encoders (all, or those named) are restarted, each when the one before serves again.

        Raises:
            RefusedError: that is going on already.
        """
        if self._rolling is not None and not self._rolling.done():
            msg = "a rolling restart is going on already"
            raise RefusedError(msg)
        wanted = list(self.cluster.slots if names is None else names)
        self._rolling = self.cluster.in_background(self._roll(wanted))
        return self._rolling

    async def _roll(self, names: list[str]) -> None:
        c = self.cluster
        # What does not serve costs nothing, and may serve afterwards: that comes first.
        for name in sorted(names, key=c.serves):
            owner = c.owners.get(name)
            if owner is None or not owner.wanted or owner.leaving or owner.spec.external:
                continue
            if owner.state is State.BLOCKED:
                continue
            if not await c.board.until(lambda name=name: not self._lacking(name), CAPACITY_S):  # type: ignore[misc]
                lacking = ", ".join(self._lacking(name))
                c.board.log(
                    "cluster",
                    f"the rolling restart ends before {name}: {lacking} not back in service",
                    "error",
                )
                return
            before = owner.life.id if owner.life else ""
            c.restart(name)

            def done(owner: Owner = owner, before: str = before) -> bool:
                renewed = owner.life is not None and owner.life.id != before and self._is_back(owner)
                given_up = not owner.wanted or owner.leaving or bool(owner.failed)
                return renewed or given_up or owner.state is State.BLOCKED

            await c.board.until(done, None)
            if not self._is_back(owner):
                c.board.log(
                    "cluster", f"the rolling restart ends here: {name} is {owner.state.value}", "error"
                )
                return
        c.board.log("cluster", "rolling restart done")

    def _is_back(self, owner: Owner) -> bool:
        """Serving; one that an operator keeps aside is back when it is ready."""
        return self.cluster.serves(owner.name) or (owner.aside and owner.state is State.READY)

    def _lacking(self, name: str) -> list[str]:
        """Encoders other than `name` that are on their way back: no second one may be taken out meanwhile."""
        c = self.cluster
        return [
            n
            for n in c.slots
            if n != name
            and (other := c.owners[n]).wanted
            and not (other.leaving or other.aside or other.failed or other.state is State.BLOCKED)
            and not c.serves(n)
        ]

    def reload(self) -> None:
        """Reads the configuration again, and applies what changed: a bad one changes nothing.

        Raises:
            RefusedError: the file cannot be used, and why.
        """
        c = self.cluster
        try:
            fresh = config.load(c.topology.path)
        except config.ConfigError as e:
            c.board.log("cluster", f"the configuration was not reloaded: {e}", "error")
            raise RefusedError(str(e), 422) from e
        if fresh.name != c.topology.name:
            msg = f"{fresh.path}: name is {fresh.name!r} now; this is the daemon of {c.topology.name!r}"
            raise RefusedError(msg, 422)
        before = c.topology
        if fresh == before:
            return
        self._refuse_other_kinds(fresh)
        c.topology = c.context.topology = fresh
        c.context.devices.set_kind(fresh.devices.kind)
        if launch.slots(fresh) != launch.slots(before):
            self._resize(launch.slots(fresh))
        self._respec(before)
        c.board.set_cluster(
            model=fresh.model.served_name or fresh.model.path, public_url=launch.public_url(fresh)
        )
        c.board.log("cluster", "configuration reloaded")
        c.store.changed()

    def _refuse_other_kinds(self, fresh: Topology) -> None:
        """What was started here cannot become external under way, nor the other way round."""
        c = self.cluster
        for spec in launch.everything(fresh, c.paths):
            owner = c.owners.get(spec.name)
            if owner is not None and owner.spec.external is not spec.external:
                msg = (
                    f"{fresh.path}: {spec.name}: external was changed; that needs `eccon down` and `eccon up`"
                )
                raise RefusedError(msg, 422)

    def _resize(self, slots: tuple[EncoderSlot, ...]) -> None:
        c = self.cluster
        fresh = {slot.name: slot for slot in slots}
        for name in [n for n in c.slots if n not in fresh]:
            c.owners[name].remove()
        for slot in slots:
            if slot.name in c.owners:
                c.slots[slot.name] = slot
            else:
                owner = self._new(slot)
                if c.wanted:
                    owner.start()

    def _respec(self, before: Topology) -> None:
        """What runs with another command line than the configuration asks for now is restarted."""
        c = self.cluster
        urls = [owner.spec.url for owner in c.owners.values() if owner.spec.role is Role.ENCODER]
        # The proxy's encoders are told to it while it runs: those are no reason to restart it.
        proxy_differs = launch.proxy(before, c.paths, urls) != launch.proxy(c.topology, c.paths, urls)
        renew = []
        for name, owner in c.owners.items():
            if owner.leaving:
                continue
            spec = c.spec(name)
            differs = proxy_differs if name == "proxy" else spec != owner.spec
            owner.spec = spec
            owner.describe()
            if differs and owner.life is not None:
                renew.append(owner)
        for owner in renew:
            c.board.log(owner.name, "its configuration changed")
            if owner.spec.role is not Role.ENCODER:
                owner.restart()
        if encoders := [o.name for o in renew if o.spec.role is Role.ENCODER]:
            self.roll(encoders)

    def _new(self, slot: EncoderSlot) -> Owner:
        c = self.cluster
        owner = c.new_owner(launch.encoder(c.topology, c.paths, slot))
        c.slots[slot.name] = slot
        c.owners[owner.name] = owner
        c.slots_changed()
        c.spawn(owner)
        return owner


def _slot_of(owner: Owner) -> EncoderSlot:
    """Of an encoder that is leaving: its index and port are not free before it has left."""
    device = int(owner.spec.device) if owner.spec.device.isdigit() else None
    return EncoderSlot(int(owner.name.rpartition("-")[2]), owner.spec.port, device)

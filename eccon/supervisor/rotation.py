"""Which encoders the proxy is to send to, who keeps one aside, and when images are held off altogether."""

import contextlib
from collections.abc import Mapping

from eccon import launch
from eccon.config import Topology
from eccon.launch import EncoderSlot
from eccon.model import State
from eccon.supervisor.board import Board
from eccon.supervisor.owner import ASIDE, Owner
from eccon.supervisor.proxylink import ProxyLink, ProxyLinkError

__all__ = ["Rotation"]


class Rotation:
    """`owners` and `slots` are the cluster's own, alive."""

    def __init__(
        self, board: Board, link: ProxyLink, owners: Mapping[str, Owner], slots: Mapping[str, EncoderSlot]
    ) -> None:
        self._board = board
        self._link = link
        self._owners = owners
        self._slots = slots
        self.paused = ""
        """Why no images go to the PD; empty when they do."""
        link.members = self._members
        link.known = lambda name: name in slots
        link.aside = lambda name: name in owners and owners[name].aside

    async def set_aside(self, owner: Owner, *, now: bool) -> None:
        """An encoder gets no more items until it is resumed, whatever is restarted meanwhile.

        Raises:
            ProxyLinkError: the proxy cannot be told now; it is told when it can.
        """
        owner.aside = True
        self._board.log(owner.name, "set aside: it is drained and gets no items")
        if owner.state is State.READY:
            owner.set_state(State.READY, ASIDE)
        await self._link.drain(owner.name, now=now)

    async def resume(self, owner: Owner) -> None:
        """An encoder that was set aside gets items again. Raises as `set_aside`."""
        owner.aside = False
        self._board.log(owner.name, "resumed")
        if owner.state is State.READY:
            owner.set_state(State.READY, "")
        if owner.name in self._members():
            await self._link.resume(owner.name)

    def is_drained(self, name: str) -> bool:
        """Whether the proxy has nothing of an encoder any more."""
        info = self._link.encoders.get(name)
        return self._link.connected and (info is None or info.state == "drained")

    async def pause_media(self, reason: str, now: bool) -> None:
        """No images to the PD until it is ready again. `now`: nor those under way."""
        self.paused = reason
        self._board.log("cluster", f"images are held off: {reason}", "warning")
        for name in list(self._link.encoders):
            with contextlib.suppress(ProxyLinkError):
                await self._link.drain(name, now=now)

    def serves(self, name: str) -> bool:
        """Whether an encoder is ready, and the proxy sends to it."""
        owner = self._owners.get(name)
        return owner is not None and owner.state is State.READY and name not in self.not_sent_to()

    def not_sent_to(self) -> dict[str, str]:
        """Those that the proxy sends nothing now, and how it calls that; itself, when there is no contact."""
        if not self._link.connected:
            return {"proxy": "starting"}
        known = self._link.encoders
        states: dict[str, str] = {n: known[n].state if n in known else "joining" for n in self._slots}
        for pd in self._link.pds.values():
            states["pd"] = pd.state
        return {n: state for n, state in states.items() if state != "ready"}

    def renew_encoders(self, topology: Topology, pd_started_at: float | None) -> None:
        """Restarts encoders with the PD, unless the proxy's identities bear it: fresh, or guarded.

        A new PD has nothing of what they sent the old one, and they do not send an identity again that they
        still hold.
        """
        if launch.sends_held_again(topology) or pd_started_at is None:
            return
        for name in self._slots:
            life = self._owners[name].life
            if life is not None and life.started_at < pd_started_at:
                self._board.log(name, "restarted with the PD: identities are not fresh")
                self._owners[name].restart(force=True)

    def _members(self) -> dict[str, str]:
        if self.paused:
            return {}
        return {
            name: self._owners[name].spec.url
            for name in self._slots
            if name in self._owners and self._owners[name].state is State.READY
        }

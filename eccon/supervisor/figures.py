"""Once a second: rates, requests in flight, stalls; and the proxy's word on the board as it comes."""

import asyncio
import time
from collections import deque

from eccon.model import Alarm, Role, State
from eccon.supervisor.cluster import Cluster
from eccon.supervisor.external import External
from eccon.supervisor.owner import Owner
from eccon.supervisor.stalls import OutWatch, StallWatch
from eccon.supervisor.traces import Traces
from eccon.supervisor.worries import silence
from eccon_proxy import stall
from eccon_proxy.schema import EncoderInfo, PDInfo, ProxyState

__all__ = ["Figures"]

EVERY_S = 1.0
HANGS_IN_PULL = "hangs with an item that the PD is fetching: the PD waits, and unguarded dies after 30 s"
EJECTED_S = 3.0
"""How long the proxy may have put an encoder out before that is called a stall."""
PULL_S = 3.0
"""A pull takes milliseconds; one that lasts this long has a hanging encoder at its other end."""
MISSING_S = 30.0
"""The connector waits so long for an image that does not come, then the PD exits (vllm-rbln 0.12)."""
RBLN = "RblnECNixlConnector"
UNGUARDED = {"", "off", "vendor"}
RATE_WINDOW = 10
"""Seconds that rates are of."""


class Figures:
    """Joins what the proxy says to the processes on the board. `run` is its task."""

    def __init__(self, cluster: Cluster, traces: Traces) -> None:
        self.cluster = cluster
        self.traces = traces
        self.stalls = StallWatch()
        self.out = OutWatch()
        self._requests_before = 0
        self._begun_before = 0
        self._counts: deque[tuple[float, int, int]] = deque(maxlen=RATE_WINDOW + 1)
        self._lives: dict[str, str] = {}
        link = cluster.link
        link.on_trace = traces.take
        link.on_contact = self._contact
        link.on_change = self._proxy_says

    async def run(self) -> None:
        """The loop."""
        while True:
            self._rates()
            for owner in list(self.cluster.owners.values()):
                self._judge(owner)
            await asyncio.sleep(EVERY_S)

    def _contact(self, state: ProxyState, ids: set[str]) -> None:
        self.traces.lost(ids)
        # Its own count begins anew with each of its lives; ours goes on from there.
        self._requests_before, self._begun_before = state.requests, self.traces.begun

    def _proxy_says(self) -> None:
        link, board = self.cluster.link, self.cluster.board
        for owner in self.cluster.owners.values():
            if owner.spec.role is Role.ENCODER:
                info = link.encoders.get(owner.name) if link.connected else None
                board.update(owner.name, encoder=info)
            elif owner.spec.role is Role.PD:
                pds = list(link.pds.values()) if link.connected else []
                board.update(owner.name, pd=pds[0] if pds else None)
                if pds:
                    self._pd_says(owner, pds[0])
                    if isinstance(owner, External) and owner.epoch(pds[0].epoch):
                        self.cluster.in_background(owner.context.became_ready(owner.name))
        self._inflight()
        self.cluster.judge()

    def _inflight(self) -> None:
        t = self.traces
        self.cluster.board.set_cluster(
            inflight=len(t.open),
            requests=self._requests_before + t.begun - self._begun_before,
            ttft=t.ttft(),
        )

    def _rates(self) -> None:
        now = time.monotonic()
        items = sum(e.items for e in self.cluster.link.encoders.values())
        self._counts.append((now, self.traces.begun, items))
        then, begun, items_then = self._counts[0]
        elapsed = now - then
        if elapsed > 0:
            self.cluster.board.set_cluster(
                requests_per_s=round((self.traces.begun - begun) / elapsed, 1),
                items_per_s=round(max(0, items - items_then) / elapsed, 1),
            )
        self._inflight()

    def _judge(self, owner: Owner) -> None:
        key = f"stalled:{owner.name}"
        life = owner.life.id if owner.life else ""
        if self._lives.get(owner.name) != life:
            self._lives[owner.name] = life
            self.stalls.forget(owner.name)
            self.out.forget(owner.name)
            self.cluster.board.end_alarm(key)
        if owner.spec.role is not Role.ENCODER:
            return
        info = self.cluster.link.encoders.get(owner.name) if self.cluster.link.connected else None
        trouble = self._trouble(owner, info) if info else ""
        if owner.dying_since is not None:
            return
        alarmed = any(a.key == key for a in self.cluster.board.alarms)
        if trouble and info and owner.state in {State.READY, State.STALLED}:
            pulled = self.cluster.listener.transfers.pulling_s().get(owner.name, 0.0) > PULL_S
            told = "holds items and finishes none" if info.inflight and not pulled else trouble
            self._alarm(key, owner.name, HANGS_IN_PULL if pulled else told)
            owner.set_state(State.STALLED, trouble)
            limit = self.cluster.topology.supervisor.restart_stalled_s
            late = limit is not None and time.time() - owner.process.since > limit
            if late and owner.settled_in_life and not (owner.spec.external or self.cluster.ending):
                self.cluster.restart(owner.name)
        elif alarmed and not trouble:
            self.cluster.board.end_alarm(key)
            if owner.state is State.STALLED:
                owner.set_state(State.READY, "")

    def _trouble(self, owner: Owner, info: EncoderInfo) -> str:
        """Why an encoder whose health is good is of no use; empty when it is."""
        pulling = self.cluster.listener.transfers.pulling_s().get(owner.name, 0.0)
        if pulling > PULL_S:
            return f"the PD has waited {pulling:.0f} s for an item that it sent"
        stuck = self.stalls.stuck_s(info)
        if stuck is not None:
            return f"{info.inflight} in flight, none finished for {stuck:.0f} s"
        # The proxy may have known it from its start or its last life: let it look again first.
        out = self.out.out_s(info, owner.ready_at or time.time())
        if out is not None and out > EJECTED_S:
            return f"the proxy sends it nothing: {info.reason}"
        return ""

    def _pd_says(self, owner: Owner, info: PDInfo) -> None:
        key = f"stalled:{owner.name}"
        if info.state == "stalled" and owner.state in {State.READY, State.STALLED}:
            told = info.reason or "holds requests and sends nothing"
            self._alarm(key, owner.name, told, self._death_due(owner, info))
            owner.set_state(State.STALLED, info.reason or "requests in flight and not a byte")
        elif (
            info.state == "ready"
            and owner.dying_since is None
            and any(a.key == key for a in self.cluster.board.alarms)
        ):
            self.cluster.board.end_alarm(key)
            if owner.state is State.STALLED:
                owner.set_state(State.READY, "")

    def _death_due(self, owner: Owner, info: PDInfo) -> float | None:
        """When a stalled PD exits if a missing image is what it waits for; None: another silence may pass.

        By the time that the proxy calls it stalled it has waited: for `stall_after`, and until a token that
        was then asked for was late.
        """
        mortal = self.cluster.topology.connector.kind == RBLN and owner.process.guard in UNGUARDED
        waited = self.cluster.link.setting("stall_after") * (1 + stall.LATE)
        return info.since - waited + MISSING_S if mortal else None

    def _alarm(self, key: str, subject: str, text: str, due: float | None = None) -> None:
        alarm = Alarm(
            key=key,
            subject=subject,
            text=text,
            since=time.time(),
            severity="critical",
            help="restart",
            due=due,
        )
        self.cluster.board.raise_alarm(alarm, instead_of=silence(subject))

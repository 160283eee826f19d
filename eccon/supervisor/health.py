"""Watches one life: when it is ready, and whether it still is.

Ready means: its health endpoint says so, `/v1/models` names our model, and it is our own child that lives and
listens there alone.
"""

import asyncio
import time
from typing import TYPE_CHECKING

from eccon.model import Role, State
from eccon.signals.vllm_metrics import EngineMetrics
from eccon.supervisor import ports
from eccon.supervisor.lives import Life

if TYPE_CHECKING:
    from eccon.supervisor.owner import Owner

__all__ = ["HealthWatch"]

UNWELL_AFTER = 3
"""Probes in a row that must fail before a ready process is called stalled: no flapping."""
MODEL_EVERY_S = 30.0
DEATH_S = 10.0
"""What says that it dies, and does not within this time, is looked at, and ended unless it is well."""
METRICS_EVERY_S = {Role.PD: 5.0, Role.ENCODER: 15.0}


class HealthWatch:
    """Probes until cancelled. Changes its owner's state between starting, loading, ready and stalled only."""

    def __init__(self, owner: "Owner", life: Life) -> None:
        self.owner = owner
        self.life = life
        self.unwell = 0
        self.model_at = 0.0
        self.metrics = EngineMetrics()
        self.metrics_at = 0.0
        self.dead_since: float | None = None

    async def run(self) -> None:
        """The loop. Ends when the process has died."""
        policy = self.owner.context.topology.supervisor
        while not self.life.died:
            if self.owner.state in {State.READY, State.STALLED}:
                await self._still_ready()
                await self._read_metrics()
                await asyncio.sleep(policy.probe_interval_s)
            elif self.owner.state in {State.DRAINING, State.STOPPING, State.BLOCKED}:
                await asyncio.sleep(policy.probe_interval_s)
            else:
                await self._maybe_ready()
                await asyncio.sleep(min(0.25, policy.probe_interval_s))

    async def _maybe_ready(self) -> None:
        owner, context = self.owner, self.owner.context
        policy = context.topology.supervisor
        health = await context.prober.health(owner.spec)
        reason = health.reason
        if health.ok:
            reason = await self._names_our_model() or await self._intruder()
            if not reason and not self.life.died:
                await owner.became_ready(self.life)
                return
        if self.life.died:
            return
        if owner.state not in {State.STARTING, State.LOADING}:
            owner.set_state(State.STARTING, "")
        if not health.refused and reason and not health.ok:
            owner.set_state(State.LOADING, reason)
        elif health.ok:
            owner.set_state(owner.state, reason)
        owner.estimate()
        waited = time.time() - self.life.started_at
        if waited > policy.start_timeout_s:
            owner.doom = f"not ready after {policy.start_timeout_s:g} s: {reason}"
            owner.wake()

    async def _still_ready(self) -> None:
        owner = self.owner
        health = await owner.context.prober.health(owner.spec)
        reason = health.reason
        if health.ok and time.monotonic() - self.model_at > MODEL_EVERY_S:
            reason = await self._names_our_model()
        if self.life.died or owner.state not in {State.READY, State.STALLED}:
            return
        now = time.monotonic()
        self.dead_since = (self.dead_since or now) if health.dead else None
        if self.dead_since is not None and now - self.dead_since > DEATH_S:
            self._doom("its engine is dead and it did not exit")
            return
        if owner.dying_since is not None:
            if now - owner.dying_since > DEATH_S:
                await self._dies_or_not(well=health.ok)
            return
        if not reason:
            if self.unwell >= UNWELL_AFTER and owner.state is State.STALLED:
                await owner.became_ready(self.life)
            self.unwell = 0
            return
        self.unwell += 1
        if self.unwell >= UNWELL_AFTER or health.dead:
            self.unwell = max(self.unwell, UNWELL_AFTER)
            owner.set_state(State.STALLED, reason)

    async def _dies_or_not(self, *, well: bool) -> None:
        """It announced its death and lives: is it of use? A PD is asked for a token."""
        owner = self.owner
        if owner.spec.role is Role.PD:
            model = owner.context.topology.model
            well = await owner.context.prober.flush(owner.spec, model.served_name or model.path, DEATH_S)
        if self.life.died or owner.state is not State.STALLED or owner.dying_since is None:
            return
        owner.dying_since = None
        if well:
            owner.context.board.log(owner.name, "lives on, and answers: it is used again", "warning")
            await owner.became_ready(self.life)
        else:
            self._doom("said that it would exit, did not, and does not answer")

    def _doom(self, why: str) -> None:
        self.owner.doom = why
        self.owner.wake()

    async def _intruder(self) -> str:
        """Who else listens on its port; empty when nobody does."""
        name = self.owner.name
        asked = {name: (self.owner.spec.port, self.owner.context.tree(name))}
        found = (await asyncio.to_thread(ports.intruders, asked))[name]
        return "" if found is None or self.life.died else found.beside

    async def _read_metrics(self) -> None:
        """The PD's figures often: they tell how busy the cluster is. An encoder's rarely."""
        owner = self.owner
        every = METRICS_EVERY_S.get(owner.spec.role)
        if every is None or time.monotonic() - self.metrics_at < every:
            return
        self.metrics_at = time.monotonic()
        text = await owner.context.prober.metrics(owner.spec)
        if text and not self.life.died:
            owner.context.board.update(owner.name, engine=self.metrics.take(self.life.id, text))

    async def _names_our_model(self) -> str:
        """Empty when it serves our model; else what is wrong."""
        owner, context = self.owner, self.owner.context
        if owner.spec.role is Role.PROXY:
            return ""
        model = context.topology.model
        health = await context.prober.serves(owner.spec, {model.served_name or model.path})
        if health.ok:
            self.model_at = time.monotonic()
        return health.reason

"""A process that somebody else starts and stops: watched, shown and routed to, never signalled."""

import time

from eccon.launch import ProcessSpec
from eccon.model import Role, State
from eccon.signals.vllm_metrics import EngineMetrics
from eccon.supervisor.context import Context
from eccon.supervisor.health import METRICS_EVERY_S, MODEL_EVERY_S, UNWELL_AFTER
from eccon.supervisor.owner import Owner

__all__ = ["External"]


class External(Owner):
    """In the place of an owner. It has no life: only what its URL answers counts."""

    def __init__(self, context: Context, spec: ProcessSpec) -> None:
        super().__init__(context, spec)
        self.context.board.update(self.name, external=True)
        self._metrics = EngineMetrics()
        self._metrics_at = 0.0
        self._model_at = 0.0
        self._unwell = 0
        self._epoch: float | None = None

    def epoch(self, begun: float | None) -> bool:
        """Takes when its present life began (Unix time), as its metrics say; True when that is a new life.

        Whoever runs it may restart it between two probes: only this tells.
        """
        if begun is None or begun == self._epoch:
            return False
        before, self._epoch = self._epoch, begun
        if before is None:
            return False
        self.restarts += 1
        self.context.board.update(self.name, restarts=self.restarts)
        self.context.board.log(self.name, "was restarted by whoever runs it: a new life", "warning")
        return True

    @property
    def settled(self) -> bool:
        """Nothing that is done here changes it."""
        return not self.leaving

    async def run(self) -> None:
        """Probes until it leaves the topology, or the task is cancelled."""
        while not self.leaving:
            await self._probe()
            await self._woken(self.context.topology.supervisor.probe_interval_s)

    async def _probe(self) -> None:
        context, before = self.context, self.state
        health = await context.prober.health(self.spec)
        reason = health.reason
        if health.ok and (before is not State.READY or time.monotonic() - self._model_at > MODEL_EVERY_S):
            model = context.topology.model
            reason = (await context.prober.serves(self.spec, {model.served_name or model.path})).reason
            self._model_at = time.monotonic()
        if not reason:
            # What the proxy finds stuck is so until the proxy says otherwise, however good its health.
            stuck = before is State.STALLED and self._unwell < UNWELL_AFTER
            self._unwell = 0
            if before is not State.READY and not stuck:
                self.ready_at = time.time()
                self.set_state(State.READY, "")
                await context.became_ready(self.name)
            await self._read_metrics()
            return
        self._unwell += 1
        context.board.update(self.name, engine=None)
        told = f"{self.spec.url}: {reason}"
        if before is State.READY and not health.refused and self._unwell < UNWELL_AFTER:
            return
        if before in {State.READY, State.STALLED} and not health.refused:
            self.set_state(State.STALLED, told)
        else:
            self.ready_at = None
            self.set_state(State.WAITING, told)

    async def _read_metrics(self) -> None:
        if time.monotonic() - self._metrics_at < METRICS_EVERY_S[Role.PD]:
            return
        self._metrics_at = time.monotonic()
        if text := await self.context.prober.metrics(self.spec):
            self.context.board.update(self.name, engine=self._metrics.take("", text))

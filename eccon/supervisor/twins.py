"""Looks for other servers on our processes' ports: with SO_REUSEPORT both start, and share the requests.

One look for all of them: reading the kernel's table of sockets costs the same for one port as for a hundred.
"""

import asyncio
import time

from eccon.model import Alarm, State
from eccon.supervisor import ports
from eccon.supervisor.cluster import Cluster

__all__ = ["Twins"]

EVERY_S = 30.0
KIND = "twin"


class Twins:
    """`run` is its task: now, and every half minute. What is ready for the first time looks for itself."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._look()
            await asyncio.sleep(EVERY_S)

    async def _look(self) -> None:
        serving = {
            owner.life.id: owner
            for owner in self.cluster.owners.values()
            if owner.life is not None and owner.state in {State.READY, State.STALLED}
        }
        asked = {life: (o.spec.port, self.cluster.listener.tree(o.name)) for life, o in serving.items()}
        found = await asyncio.to_thread(ports.intruders, asked)
        board = self.cluster.board
        for alarm in board.alarms:
            kind, _, life = alarm.key.partition(":")
            if kind == KIND and life not in found:
                board.end_alarm(alarm.key)
        for life, holder in found.items():
            owner = serving[life]
            if holder is None or owner.life is None or owner.life.id != life or owner.life.died:
                board.end_alarm(f"{KIND}:{life}")
                continue
            board.raise_alarm(
                Alarm(
                    key=f"{KIND}:{life}",
                    subject=owner.name,
                    text=holder.beside,
                    since=time.time(),
                    severity="critical",
                    help="doctor",
                )
            )

"""Servers with the guarded connector, as the contract tests start them without: stand-in or real vLLM."""

import os
from typing import Any

from eccon.connector import CLASS, DIRECTORY, MODULE
from tests.contract.client import ask, fresh, part
from tests.contract.target import LabTarget, Server, SimTarget, free_port, until

__all__ = ["GuardedCluster", "GuardedLab", "GuardedSim", "GuardedTarget", "encode"]

TRANSFER = {"ec_connector": CLASS, "ec_connector_module_path": MODULE}


class GuardedSim(SimTarget):
    """The stand-in, every server of it guarded. The guard's own times are real ones there."""

    wait_s = 1.0
    guarded = True

    def connector(self) -> dict[str, Any]:
        return TRANSFER

    def launch(self, name: str, role: str, extra: dict[str, Any], *flags: str, **more: Any) -> Server:
        times = {"guard_wait_s": self.wait_s, "guard_pull_timeout_s": 1.0, "guard_delivery_wait_s": 0.5}
        return super().launch(name, role, times | extra, *flags, **more)


class GuardedLab(LabTarget):
    """The lab, every server of it guarded."""

    wait_s = 3.0
    guarded = True

    def connector(self) -> dict[str, Any]:
        return TRANSFER

    def environment(self) -> dict[str, str]:
        before = os.environ.get("PYTHONPATH")
        return super().environment() | {"PYTHONPATH": str(DIRECTORY) + (f":{before}" if before else "")}


GuardedTarget = GuardedSim | GuardedLab


class GuardedCluster:
    """A PD, an encoder, and one that holds a single item. All start at once: a start takes its time."""

    def __init__(self, lab: GuardedTarget) -> None:
        self.lab = lab
        self.pull_port = free_port()
        self.pd = self.new_pd()
        self.first = lab.encoder(self.pull_port)
        self.small = lab.encoder(self.pull_port, producer_cache_capacity=1)

    def new_pd(self) -> Server:
        """Start one."""
        return self.lab.pd(self.pull_port)

    def restart_pd(self) -> None:
        """A new life of the PD, on the same connector port; returns when all is well."""
        self.pd.destroy()
        self.settle()

    def settle(self) -> None:
        """Wait until everybody is ready and the first items have come through; start what is gone."""
        if not self.pd.alive():
            self.pd = self.new_pd()
        if not self.first.alive():
            self.first = self.lab.encoder(self.pull_port)
        if not self.small.alive():
            self.small = self.lab.encoder(self.pull_port, producer_cache_capacity=1)
        for server in (self.pd, self.first, self.small):
            server.wait_ready()
        for encoder in (self.first, self.small):
            until(lambda e=encoder: encode(e, fresh()) == "delivered", 60, "no way to the PD")  # type: ignore[misc]


def encode(encoder: Server, uuid: str, **more: Any) -> str:
    """Encode an image under this uuid; what became of the push, or the status when it failed."""
    reply = ask(encoder, [part(uuid, **more)], max_tokens=1)
    if reply.status != 200:
        return str(reply.status)
    found: str = reply.json()["ec_transfer_params"]["ec_guard"][uuid]
    return found

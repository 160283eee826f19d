"""What the others ask of the PD: whether it is there, since when, and that it takes a step."""

from collections.abc import Mapping

from eccon.model import State
from eccon.supervisor.context import Context
from eccon.supervisor.owner import Owner

__all__ = ["Pd"]

FLUSH_TIMEOUT_S = 10.0


class Pd:
    """The cluster's, ours or external. `owners` is the cluster's own, alive."""

    def __init__(self, owners: Mapping[str, Owner]) -> None:
        self._owners = owners

    @property
    def _owner(self) -> Owner:
        return self._owners["pd"]

    def waits_for(self, name: str) -> str:
        """Why a process may not start before the PD is ready; empty when it may."""
        pd = self._owners.get("pd")
        if name in {"pd", "proxy"} or pd is None or pd.state is State.READY:
            return ""
        return f"for the PD, which is {pd.state.value}"

    def lives(self) -> bool:
        """Whether there is one that a careless stop of an encoder could take along."""
        pd = self._owner
        if pd.spec.external:
            return pd.state in {State.READY, State.STALLED}
        return pd.life is not None and not pd.life.died

    def started_at(self, context: Context) -> float | None:
        """Begin of its present life, Unix time; None when it has none or it is not known."""
        pd = self._owner
        if pd.spec.external:
            return next((info.epoch for info in context.proxy.pds.values()), None)
        return pd.life.started_at if pd.life else None

    async def flush(self) -> bool:
        """A text request to it, so that it takes what encoders have pushed; True when it was answered."""
        pd = self._owner
        if pd.state is not State.READY:
            return False
        model = pd.context.topology.model
        return await pd.context.prober.flush(pd.spec, model.served_name or model.path, FLUSH_TIMEOUT_S)

"""The cluster's health in one word and a reason. Pure."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Literal

from eccon.model import State

__all__ = ["judge"]

Health = Literal["ok", "degraded", "unavailable", "stopped", "starting"]
STARTING = {State.STARTING, State.LOADING, State.WAITING}
SOON = {"probing", "joining", "starting"}
"""What the proxy says of a process that it will send to in a moment."""
NAMED = 3
"""Processes that the reason names."""


def judge(
    states: Mapping[str, State],
    wanted: AbstractSet[str],
    encoders: AbstractSet[str],
    aside: Mapping[str, str],
    external: AbstractSet[str] = frozenset(),
) -> tuple[Health, str]:
    """Of processes by name.

    Args:
        states: of every process.
        wanted: those that should be up.
        encoders: which of them are encoders.
        aside: those that the proxy sends nothing, and how it calls that.
        external: those that others start: they may run on when the cluster is stopped.
    """
    if all(s is State.STOPPED for n, s in states.items() if n not in external):
        return "stopped", ""
    unwell = [n for n, s in states.items() if s is not State.READY and n in wanted]
    aside = {n: how for n, how in aside.items() if states.get(n) is State.READY and n in wanted}
    vital = [n for n in ("pd", "proxy") if states.get(n) is not State.READY or n in aside]
    some_encoder = any(states.get(n) is State.READY and n not in aside for n in encoders)
    if some_encoder and not vital and not unwell and not aside:
        return "ok", ""
    names = [*vital, *(n for n in unwell if n not in vital)]
    said = [f"{n} {states[n].value}" for n in names if n in states and n not in aside]
    said += [f"{n} {how}" for n, how in aside.items()]
    reason = ", ".join(said[:NAMED]) or "no encoder is ready"
    if len(said) > NAMED:
        reason += f" and {len(said) - NAMED} more"
    if some_encoder and not vital:
        return "degraded", reason
    starting = all(states[n] in STARTING for n in unwell) and all(how in SOON for how in aside.values())
    return ("starting" if (unwell or aside) and starting else "unavailable"), reason

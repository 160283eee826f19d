"""The cluster's health in one word and a reason. Pure."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Literal

from eccon.model import State

__all__ = ["judge"]

Health = Literal["ok", "degraded", "unavailable", "stopped", "starting"]
STARTING = {State.STARTING, State.LOADING, State.WAITING}
NAMED = 3
"""Processes that the reason names."""


def judge(
    states: Mapping[str, State], wanted: AbstractSet[str], encoders: AbstractSet[str]
) -> tuple[Health, str]:
    """Of processes by name; `wanted` are those that should be up."""
    if all(s is State.STOPPED for s in states.values()):
        return "stopped", ""
    unwell = [n for n, s in states.items() if s is not State.READY and n in wanted]
    vital = [n for n in ("pd", "proxy") if states.get(n) is not State.READY]
    some_encoder = any(states.get(n) is State.READY for n in encoders)
    if some_encoder and not vital and not unwell:
        return "ok", ""
    names = [*vital, *(n for n in unwell if n not in vital)]
    reason = (
        ", ".join(f"{n} {states[n].value}" for n in names[:NAMED] if n in states) or "no encoder is ready"
    )
    if len(names) > NAMED:
        reason += f" and {len(names) - NAMED} more"
    if some_encoder and not vital:
        return "degraded", reason
    if unwell and all(states[n] in STARTING for n in unwell):
        return "starting", reason
    return "unavailable", reason

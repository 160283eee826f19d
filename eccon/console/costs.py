"""What a destructive action costs, in words, before it is done."""

from collections.abc import Callable

from eccon.console.draw.marks import presence, serves
from eccon.console.draw.text import clean
from eccon.model import ClusterState, Process, Role

__all__ = ["question", "scale"]


def question(action: str, state: ClusterState, process: Process | None) -> tuple[str, list[str]]:
    """The question that names the target, and what will be lost, kept or waited for."""
    if process is None:
        return _OF_CLUSTER[action](state)
    title = f"{_VERBS[action]} {clean(process.name)}?"
    lines = [_present(process)]
    if process.role is Role.ENCODER:
        lines += _encoder(action, state, process)
    elif process.role is Role.PD:
        lines += _pd(action, state, process)
    else:
        n = state.cluster.inflight
        lines.append(f"{_n(n, 'request')} in flight; clients get no answer while the proxy is away")
        if action == "restart":
            lines.append("PD and encoders keep running")
    return title, lines


_VERBS = {"restart": "Restart", "stop": "Stop", "kill": "Kill", "remove": "Remove", "drain": "Drain"}


def _n(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}" if count else f"no {word}"


def _present(process: Process) -> str:
    why = process.reason or (process.encoder.reason if process.encoder is not None else "")
    return f"It is {presence(process)[1]}{f': {clean(why)}' if why else ''}."


def _encoder(action: str, state: ClusterState, process: Process) -> list[str]:
    others = sum(p.role is Role.ENCODER and serves(p) and p.name != process.name for p in state.processes)
    held = process.encoder.inflight if process.encoder else 0
    staged = process.encoder.staged if process.encoder else 0
    lines = []
    if action == "kill":
        both = f"{_n(held, 'item')} being encoded and {_n(staged, 'item')} staged there are lost"
        lines.append(both if held or staged else "Nothing is being encoded or staged there")
        if staged:
            lines.append("A PD that waits for a staged item may exit: stop drains first")
    elif action == "drain":
        both = f"{_n(held, 'item')} being encoded, {_n(staged, 'item')} staged: they go on to the PD"
        lines.append(both if held or staged else "Nothing is being encoded or staged there")
        lines.append("It goes on running and gets no more items, until it is resumed")
    else:
        lines.append(f"Drained first: {_n(held, 'item')} being encoded, {_n(staged, 'item')} staged")
    if others:
        pd = next((p for p in state.processes if p.role is Role.PD), None)
        serving = "PD keeps serving" if pd is None or serves(pd) else f"The PD is {pd.state.value}"
        lines.append(f"{serving}; {_n(others, 'encoder')} remain{'s' if others == 1 else ''}")
    else:
        lines.append("No other encoder is ready: requests with images are refused meanwhile")
    return lines


def _pd(action: str, state: ClusterState, process: Process) -> list[str]:
    n = process.pd.inflight if process.pd else state.cluster.inflight
    end = "fail" if action == "kill" else "may end first"
    held = f"{_n(n, 'request')} at the PD {end}" if n else "No request is at the PD"
    lines = [f"{held}; no answer until it is ready again"]
    staged = sum(p.encoder.staged for p in state.processes if p.encoder)
    if staged:
        lines.append(f"{_n(staged, 'item')} staged for it are void and encoded again")
    return lines


def _add(state: ClusterState) -> tuple[str, list[str]]:
    encoders = sum(p.role is Role.ENCODER for p in state.processes)
    return "Add an encoder?", [
        f"There are {encoders}; the new one takes the next free device and port.",
        "It takes items as soon as it is ready.",
    ]


def _down(state: ClusterState) -> tuple[str, list[str]]:
    n = state.cluster.inflight
    return f"Stop all servers of {clean(state.cluster.name)}?", [
        f"{_n(n, 'request')} in flight: the proxy drains first",
        "No request is answered until it is up again",
    ]


def _roll(state: ClusterState) -> tuple[str, list[str]]:
    names = [p.name for p in state.processes if p.role is Role.ENCODER and p.wanted]
    return f"Restart {_n(len(names), 'encoder')}, one after the other?", [
        "Each is drained first; the next waits until it is ready again",
        "The daemon does it: it goes on when this console is left",
    ]


def scale(state: ClusterState, count: int) -> tuple[str, list[str]]:
    """The question before there are `count` encoders."""
    encoders = [p for p in state.processes if p.role is Role.ENCODER]
    if count >= len(encoders):
        more = count - len(encoders)
        take = "takes the next free device and port" if more == 1 else "take the next free devices and ports"
        return f"Scale to {_n(count, 'encoder')}?", [f"There are {len(encoders)}; {more} more {take}."]
    leaving = encoders[count:]
    held = sum(p.encoder.inflight for p in leaving if p.encoder)
    staged = sum(p.encoder.staged for p in leaving if p.encoder)
    return f"Scale to {_n(count, 'encoder')}?", [
        f"{', '.join(clean(p.name) for p in leaving)} leave{'s' if len(leaving) == 1 else ''} the cluster",
        f"{_n(held, 'item')} being encoded, {_n(staged, 'item')} staged: drained first",
    ]


def _reload(state: ClusterState) -> tuple[str, list[str]]:
    return "Read the configuration again?", [
        clean(state.cluster.config_path),
        "A file with errors is refused, and what runs stays as it is",
    ]


_OF_CLUSTER: dict[str, Callable[[ClusterState], tuple[str, list[str]]]] = {
    "add": _add,
    "down": _down,
    "roll": _roll,
    "reload": _reload,
}

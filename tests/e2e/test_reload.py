"""A changed eccon.toml is applied to what it changes, and to nothing else."""

import json
from collections.abc import Callable

import pytest

from tests.e2e.cluster import Cluster, until


def pids(c: Cluster) -> dict[str, int]:
    """Of the processes that are ready."""
    return {p["name"]: p["pid"] for p in c.state()["processes"] if p["state"] == "ready"}


def changed(c: Cluster, before: dict[str, int], edit: Callable[[str], str]) -> set[str]:
    """Reloads with an edited file; what was renewed, once all are ready again."""
    c.config.write_text(edit(c.config.read_text()))
    c.eccon("reload")

    def settled() -> dict[str, int] | None:
        # The rolling restart's end is in the history; what is not rolled is stopping by now or never.
        busy = [p for p in c.state()["processes"] if p["state"] != "ready"]
        now = pids(c)
        return None if busy or len(now) != len(before) else now

    def renewed() -> dict[str, int] | None:
        now = settled()
        return now if now and now != before else None

    now = until(renewed, "something was renewed and all are ready", 90)
    return {name for name in now if now[name] != before.get(name)}


@pytest.mark.timeout(400)
def test_only_what_changed_is_restarted(fresh: Cluster) -> None:
    fresh.eccon("up", timeout=110)
    before = pids(fresh)
    override = "\n[[encoders.override]]\nindex = 1\nargs = ['--seed', '7']\n"
    assert changed(fresh, before, lambda t: t + override) == {"encoder-1"}
    assert "--seed" in fresh.process("encoder-1")["argv"]
    before = pids(fresh)
    assert changed(fresh, before, lambda t: t + "\n[proxy.settings]\nqueue = 50\n") == {"proxy"}

    # What concerns no process that runs renews none; a file with a fault is refused as a whole.
    before = pids(fresh)
    good = fresh.config.read_text()
    fresh.config.write_text(good + "\n[compile]\nbatch_size = 4\n")
    fresh.eccon("reload")
    for fault in ("[compile]\nbatch = 4\n", "[pd]\nport = 1\n", "[compile\n"):
        fresh.config.write_text(f"{good}\n{fault}")
        assert "eccon.toml:" in fresh.eccon("reload", code=2).stderr
    # With a file that is not even TOML the cluster is still reached.
    state = fresh.state()
    assert {p["name"]: p["pid"] for p in state["processes"]} == before
    assert {p["state"] for p in state["processes"]} == {"ready"}

    # And the history tells it, to whoever asks from a shell.
    lines = fresh.eccon("events", "-n", "500").stdout.splitlines()
    assert any(line.endswith("encoder-1    its configuration changed") for line in lines)
    told = [json.loads(line) for line in fresh.eccon("events", "-n", "3", "--json").stdout.splitlines()]
    assert len(told) == 3
    assert all(event["at"] and event["subject"] and event["text"] for event in told)

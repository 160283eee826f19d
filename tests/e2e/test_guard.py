"""A guarded cluster of stand-ins by the `eccon` command: encoders die at the worst moment, nobody notices."""

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.cluster import Cluster, assert_names_the_samples, cluster, samples, until

SAMPLES = [arg for path in samples() for arg in ("-i", str(path))]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Cluster]:
    with cluster(encoders=2) as c:
        text = c.config.read_text()
        assert "[connector]" in text
        c.config.write_text(text.replace("[connector]", '[connector]\nguard = "on"\nguard_wait_s = 1.0', 1))
        c.eccon("up", timeout=120)
        yield c


def processes(c: Cluster) -> dict[str, dict[str, Any]]:
    return {p["name"]: p for p in c.state()["processes"]}


def test_the_level_in_force_is_on_the_board_and_transfers_come_from_events(guarded: Cluster) -> None:
    done = guarded.eccon("send", *SAMPLES)
    assert_names_the_samples(done.stdout)
    state = until(
        lambda: (s := guarded.state())["cluster"]["transfer_source"] == "guard" and s, "events are the source"
    )
    assert {p["guard"] for p in state["processes"] if p["role"] != "proxy"} == {"gate"}
    assert state["cluster"].get("lost_guard_events", 0) == 0
    told = json.loads(guarded.eccon("doctor", "--json", code=None).stdout)
    levels = [f["text"].partition(":")[0] for f in told if f["check"] == "guard-level"]
    assert levels == ["gate in pd, encoder-0, encoder-1"]
    counts = [p["transfer"]["total"]["count"] for p in state["processes"] if p["role"] == "encoder"]
    assert sum(counts) == len(samples())  # once each, though the log tells the same


def test_encoders_killed_under_load_cost_no_request_and_no_pd(guarded: Cluster) -> None:
    before = processes(guarded)["pd"]
    with ThreadPoolExecutor(4) as pool:
        sends = [pool.submit(guarded.eccon, "send", *SAMPLES, code=None, timeout=90) for _ in range(4)]
        for name in ("encoder-0", "encoder-1"):
            tree = psutil.Process(processes(guarded)[name]["pid"])
            for p in (tree, *tree.children(recursive=True)):
                p.send_signal(signal.SIGKILL)
            until(lambda name=name: processes(guarded)[name]["state"] == "ready", f"{name} is back", 60)  # type: ignore[misc]
        codes = [s.result().returncode for s in sends]
    after = processes(guarded)["pd"]
    assert (after["pid"], after["restarts"]) == (before["pid"], before["restarts"])
    assert codes.count(0) >= 3, [s.result().stderr for s in sends]
    done = guarded.eccon("send", *SAMPLES)
    assert_names_the_samples(done.stdout)


def test_what_the_children_are_told(guarded: Cluster) -> None:
    argv = processes(guarded)["encoder-1"]["argv"]
    transfer = json.loads(argv[argv.index("--ec-transfer-config") + 1])
    assert transfer["ec_connector"] == "EcconGuardConnector"
    events = transfer["ec_connector_extra_config"]["guard_events"]
    assert Path(events).stat().st_mode & 0o777 == 0o600
    log = guarded.eccon("logs", "pd", "-n", "2000").stdout
    assert re.search(r"EC guard: level=gate role=ec_consumer", log)

"""Servers that others started: `eccon init --running` makes a cluster of them, and leaves them be."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from eccon import config, scaffold
from eccon.console.welcome import choices, found
from eccon.discovery import Findings, Server
from eccon.running import Group, groups, toml
from tests.e2e.cluster import FAST, Cluster, assert_names_the_samples, cluster, listens, until

RBLN = "RblnECNixlConnector"


def words(port: int, role: str, *more: str, kind: str = RBLN, **extra: object) -> list[str]:
    """`serve` and what follows, as the guide's scripts have it."""
    transfer = {"ec_connector": kind, "ec_role": role, "ec_connector_extra_config": extra}
    return ["serve", "m", "--port", str(port), "--ec-transfer-config", json.dumps(transfer), *more]


def server(pid: int, *argv: str, directory: str = "") -> Server:
    return Server(pid, None, "m", ("vllm", *argv), directory)


@contextmanager
def theirs(c: Cluster) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A PD and two encoders of the cluster's ports; nobody of eccon's started them."""
    _, pd, connector, encoder = c.ports
    commands = [words(pd, "ec_consumer", "--host", "127.0.0.1", pull_host="127.0.0.1", pull_port=connector)]
    commands += [
        words(encoder + i, "ec_producer", "--host", "127.0.0.1", llm_pull_port=connector) for i in range(2)
    ]
    null = subprocess.DEVNULL
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "eccon.sim", *argv],
                    cwd=c.directory,
                    env=os.environ | FAST,
                    stdout=null,
                    stderr=null,
                )
            )
            for argv in commands
        ]
        try:
            for port in (pd, encoder, encoder + 1):
                until(lambda port=port: listens(port), f"port {port}", 60)  # type: ignore[misc]
            yield started
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(30)


def test_servers_that_run_become_a_cluster_and_outlive_it() -> None:
    with cluster(encoders=2) as c:
        (c.directory / scaffold.DEMO_MODEL).rename(c.directory / "m")
        c.config.unlink()
        with theirs(c) as running:
            done = c.eccon("init", "--running", str(c.ports[1]), "--name", "t", str(c.directory))
            assert done.stdout.strip() == str(c.config)
            topology = config.load(c.config)
            assert topology.model.path == str(c.directory / "m")
            assert topology.model.served_name == "m"
            again = c.eccon("init", "--running", str(c.ports[1]), str(c.directory), code=2)
            assert "is there already" in again.stderr
            ours = f"\nport = {topology.proxy.port}\n"
            c.config.write_text(c.config.read_text().replace(ours, f"\nport = {c.ports[0]}\n"))
            c.eccon("up", timeout=120)
            assert_names_the_samples(c.eccon("send", "--samples").stdout)
            assert [p["external"] for p in c.state()["processes"]] == [True, False, True, True]
            c.eccon("down")
            until(lambda: not c.processes(), "the proxy's end", 30)
            assert [p.poll() for p in running] == [None, None, None]
        nobody = c.eccon("init", "--running", str(c.ports[1]), str(c.directory / "x"), code=2)
        assert "no PD runs here" in nobody.stderr


def test_each_pd_with_the_encoders_that_push_to_it(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    here = str(tmp_path)
    pd = words(
        8000,
        "ec_consumer",
        "--mm-processor-kwargs",
        '{"max_pixels": 9}',
        pull_port=5,
        max_concurrent_pulls=64,
    )
    first = server(7, *words(8001, "ec_producer", llm_pull_port=5, producer_cache_capacity=9))
    one, other = groups(
        [
            server(9, *words(8002, "ec_producer", "--host=::1", "--ssl-certfile", "c.pem", llm_pull_port=5)),
            server(1, *pd, directory=here),
            server(2, "sudo", "vllm", *pd, directory=here),  # who started it has its words
            first,
            server(3, *words(8100, "ec_consumer", kind="ECExampleConnector", shared_storage_path="/a")),
            server(4, *words(8101, "ec_producer", kind="ECExampleConnector", shared_storage_path="/a")),
            server(5, *words(8102, "ec_producer", kind="ECExampleConnector", shared_storage_path="/b")),
            server(6, "serve", "m", "--port", "8200"),
            server(8, "serve", "m", "--port", "none", "--ec-transfer-config", '{"ec_role": "ec_consumer"}'),
        ]
    )
    assert _ports(one) == (8000, [8001, 8002])
    assert _ports(other) == (8100, [8101])
    (tmp_path / "eccon.toml").write_text(toml(one, name="x").text)
    topology = config.load(tmp_path / "eccon.toml", compiled=False)
    assert topology.pd.url == "http://127.0.0.1:8000"
    assert [o.url for o in topology.encoders.override] == ["http://127.0.0.1:8001", "https://[::1]:8002"]
    assert topology.connector.pd_extra == {"max_concurrent_pulls": 64}
    assert topology.connector.encoder_extra == {"producer_cache_capacity": 9}
    assert topology.connector.port == 5
    assert topology.model.max_pixels == 9
    assert any("max_pixels differs" in note for note in toml(one, name="x").notes)


def _ports(group: Group) -> tuple[int, list[int]]:
    return group.pd.port, [e.port for e in group.encoders]


@pytest.mark.parametrize("encoders", [1, 12])
def test_the_first_screen_offers_them(encoders: int) -> None:
    rows = [server(i, *words(8000 + i, "ec_producer", llm_pull_port=5)) for i in range(1, encoders + 1)]
    findings = Findings(servers=(server(99, *words(8000, "ec_consumer", pull_port=5)), *rows))
    offered = dict(choices(findings))
    assert next(iter(offered)) == "running:0"
    its = "its encoder, which" if encoders == 1 else "its 12 encoders, which"
    assert f"the PD on port 8000 and {its} run" in offered["running:0"]
    shown = ["".join(text for text, _ in line) for line in found(findings)]
    assert sum("pid" in line for line in shown) == min(encoders + 1, 8)
    assert any("and 5 more" in line for line in shown) == (encoders == 12)

"""Starts, ends and what is left: signals, a dead engine, orphans, ports, milestones."""

import re
import signal
from http.client import HTTPException

from tests.contract.client import ask, get, part, text
from tests.contract.cluster import Cluster, gone
from tests.contract.starts import Starts
from tests.contract.target import Target, until


def test_no_such_model(target: Target, starts: Starts) -> None:
    server = starts.no_model
    assert server.exit_code(target.start_s) == 1
    until(lambda: not server.family(), 5, "it left somebody behind")


def test_an_unknown_flag(target: Target, starts: Starts) -> None:
    assert starts.no_flag.exit_code(target.start_s) == 2
    assert "unrecognized arguments: --no-such-flag" in starts.no_flag.log()


def test_a_port_is_taken_before_it_listens(target: Target, starts: Starts) -> None:
    """Bound first: a port that somebody holds alone is noticed at once, not after the model was loaded."""
    assert starts.no_port.exit_code(target.start_s) != 0
    assert "Address already in use" in starts.no_port.log()
    assert "Initializing a V1 LLM engine" not in starts.no_port.log()


def test_sigkill_leaves_an_orphan_that_keeps_the_connectors_port(target: Target, starts: Starts) -> None:
    pd = starts.pd
    pd.wait_ready()
    engine = pd.engine()
    pd.signal(signal.SIGKILL)
    assert pd.exit_code(5) == -signal.SIGKILL
    assert not pd.listening()
    assert engine in pd.family()
    late = target.pd(starts.port)
    assert late.exit_code(target.start_s) != 0
    assert "zmq.error.ZMQError: Address already in use" in late.log()
    until(lambda: not late.family(), 20, "the late one left somebody behind")
    assert engine in pd.family()
    engine.terminate()
    until(lambda: not pd.family(), 30, "the orphan does not heed SIGTERM")


def test_an_encoder_may_start_before_its_pd(shared: Cluster) -> None:
    u = shared.backwards()
    shared.pd.wait_event(f"received metadata for mm_hash={u}")
    assert ask(shared.pd, [part(u), text()]).status == 200


def test_milestones_in_order(cluster: Cluster) -> None:
    server, version = cluster.pd, cluster.target.version
    server.wait_log("Application startup complete")
    log = server.log()
    marks = [
        rf"version {re.escape(version)}",
        r"non-default args: \{",
        r"Resolved architecture: Qwen3VLForConditionalGeneration",
        r"Using max model len 4096",
        rf"\(EngineCore pid=\d+\) .*Initializing a V1 LLM engine \(v{re.escape(version)}\)",
        r"Creating connector with name: RblnECNixlConnector and engine_id: ",
        rf"RblnECNixlConnector \(llm\): PULL bound on tcp://127\.0\.0\.1:{cluster.pull_port}",
        r"RblnECNixlConnector created \(role=WORKER\)",
        r"Starting to load model ",
        r"Loading safetensors checkpoint shards: +0% Completed \| 0/\d+",
        r"Loading safetensors checkpoint shards: 100% Completed \| ",
        r"Loading weights took [\d.]+ seconds",
        r"KV cache size: [\d,]+ tokens",
        r"init engine \(profile, create kv cache, warmup model\) took [\d.]+ s",
        r"RblnECNixlConnector created \(role=SCHEDULER\)",
        r"\(APIServer pid=\d+\) .*Supported tasks: \['generate'\]",
        rf"Starting vLLM server on http://127\.0\.0\.1:{server.port}",
        r"Available routes are:",
        r"Started server process",
        r"Waiting for application startup\.",
        r"Application startup complete\.",
    ]
    at = 0
    for mark in marks:
        found = re.search(mark, log[at:])
        assert found is not None, f"{mark} is not there, or too early"
        at += found.start()


def test_a_dead_engine_ends_the_server_with_code_0(cluster: Cluster) -> None:
    server = cluster.pd
    server.engine().kill()
    statuses = set()
    while server.alive() and server.listening():
        try:
            statuses.add(get(server, "/health").status)
        except (HTTPException, ConnectionError):
            break
    assert statuses <= {200, 503}
    assert 503 in statuses
    gone(server)

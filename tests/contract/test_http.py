"""Everything but chat: plain endpoints, methods, headers, metrics."""

import socket
import time

import pytest

from tests.contract.client import CHAT, ask, get, metric
from tests.contract.cluster import Cluster
from tests.contract.target import MODEL, until


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/health", b""),
        ("/ping", b""),
        ("/version", b'{"version":"%s"}'),
        ("/load", b'{"server_load":0}'),
    ],
)
def test_plain_endpoints_of_both_roles(cluster: Cluster, path: str, expected: bytes) -> None:
    for server in (cluster.pd, cluster.encoders[0]):
        reply = get(server, path)
        assert (reply.status, reply.body) == (200, expected.replace(b"%s", cluster.target.version.encode()))
        assert reply.headers["server"] == "uvicorn"
        assert reply.headers.get("content-type") == ("application/json" if expected else None)


def test_ping_takes_post_too(cluster: Cluster) -> None:
    assert get(cluster.pd, "/ping", method="POST").status == 200


def test_models_names_the_directory_as_root_and_is_new_at_every_call(cluster: Cluster) -> None:
    first, second = (get(cluster.pd, "/v1/models").json() for _ in range(2))
    card = first["data"][0]
    assert first["object"] == "list"
    assert set(card) == {
        "id",
        "object",
        "created",
        "owned_by",
        "root",
        "parent",
        "max_model_len",
        "permission",
    }
    assert (card["id"], card["owned_by"], card["parent"]) == (MODEL, "vllm", None)
    assert (card["root"], card["max_model_len"]) == (cluster.target.model, 4096)
    assert card["permission"][0]["id"] != second["data"][0]["permission"][0]["id"]


@pytest.mark.parametrize("path", ["/server_info", "/nothing", "/v1/nothing", "/"])
def test_unknown_paths(cluster: Cluster, path: str) -> None:
    reply = get(cluster.pd, path)
    assert (reply.status, reply.json()) == (404, {"detail": "Not Found"})


def test_profiling_is_off(cluster: Cluster) -> None:
    assert get(cluster.pd, "/start_profile", method="POST").status == 404


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("GET", CHAT, "POST"), ("DELETE", CHAT, "POST"), ("OPTIONS", CHAT, "POST"), ("HEAD", "/health", "GET")],
)
def test_other_methods(cluster: Cluster, method: str, path: str, allow: str) -> None:
    reply = get(cluster.pd, path, method=method)
    assert (reply.status, reply.headers["allow"]) == (405, allow)


def test_metrics_families_and_epoch(cluster: Cluster) -> None:
    for server in (cluster.pd, cluster.encoders[0]):
        reply = get(server, "/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=")
        kinds = dict(
            line.split()[2:4] for line in reply.body.decode().splitlines() if line.startswith("# TYPE")
        )
        assert (
            kinds.items()
            >= {
                "vllm:num_requests_running": "gauge",
                "vllm:num_requests_waiting": "gauge",
                "vllm:kv_cache_usage_perc": "gauge",
                "vllm:prompt_tokens_total": "counter",
                "vllm:generation_tokens_total": "counter",
                "vllm:request_success_total": "counter",
                "vllm:mm_cache_hits_total": "counter",
                "vllm:time_to_first_token_seconds": "histogram",
                "vllm:inter_token_latency_seconds": "histogram",
                "vllm:e2e_request_latency_seconds": "histogram",
                "process_start_time_seconds": "gauge",
                "process_resident_memory_bytes": "gauge",
            }.items()
        )
        assert abs(metric(server, "process_start_time_seconds") - server.family()[0].create_time()) < 120
        assert metric(server, "process_start_time_seconds") < time.time()


def test_metrics_count_tokens_and_requests(cluster: Cluster) -> None:
    names = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
    )
    before = [metric(cluster.pd, n) for n in names]
    ended = metric(cluster.pd, "vllm:request_success_total", 'finished_reason="length"')
    usage = ask(cluster.pd, "count me", max_tokens=3).json()["usage"]
    until(
        lambda: metric(cluster.pd, "vllm:request_success_total", 'finished_reason="length"') == ended + 1,
        5,
        "the request was not counted",
    )
    after = [metric(cluster.pd, n) for n in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [usage["prompt_tokens"], 3, 1]


def test_idle_connections_are_closed_after_five_seconds(cluster: Cluster) -> None:
    with socket.create_connection(("127.0.0.1", cluster.pd.port), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in connection.recv(4096)
        began = time.monotonic()
        assert connection.recv(4096) == b""
        assert 4 < time.monotonic() - began < 9

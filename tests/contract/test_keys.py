"""Two servers with API keys, from their start to their end by a signal."""

import signal
from dataclasses import dataclass

import pytest

from tests.contract.client import CHAT, body, get, post
from tests.contract.target import Server, Target, free_port, until


@dataclass
class Keyed:
    """Started side by side."""

    by_flag: Server
    """Takes two keys, and echoes request ids."""
    by_environment: Server


@pytest.fixture(scope="module")
def keyed(target: Target) -> Keyed:
    servers = Keyed(
        target.pd(free_port(), "--api-key", "one", "two", "--enable-request-id-headers"),
        target.pd(free_port(), env={"VLLM_API_KEY": "secret-word"}),
    )
    servers.by_flag.wait_ready()
    servers.by_environment.wait_ready()
    return servers


def test_keys_and_request_ids(keyed: Keyed) -> None:
    server = keyed.by_flag
    assert get(server, "/health").status == 200
    assert get(server, "/metrics").status == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "one"}):
        reply = get(server, "/v1/models", headers=headers)
        assert (reply.status, reply.json()) == (401, {"error": "Unauthorized"})
    assert post(server, body("x"), headers={"Authorization": "Basic one"}).status == 401
    assert get(server, CHAT, method="OPTIONS").status == 405
    for key in ("one", "two"):
        assert get(server, "/v1/models", headers={"Authorization": f"Bearer {key}"}).status == 200
    sent = {"Authorization": "Bearer two", "X-Request-Id": "chosen-1"}
    reply = post(server, body("x"), headers=sent)
    assert reply.headers["x-request-id"] == "chosen-1"
    assert reply.json()["id"] == "chatcmpl-chosen-1"
    assert get(server, "/health").headers["x-request-id"]


def test_a_key_may_come_from_the_environment(keyed: Keyed) -> None:
    server = keyed.by_environment
    assert get(server, "/v1/models").status == 401
    reply = get(server, "/v1/models", headers={"Authorization": "Bearer secret-word"})
    assert reply.status == 200
    assert "x-request-id" not in reply.headers
    assert "secret-word" not in server.log()


def _ends(server: Server, number: signal.Signals) -> None:
    server.signal(number)
    assert server.exit_code(20) == 0
    until(lambda: not server.family(), 5, "it left somebody behind")


def test_sigterm_ends_it_all(keyed: Keyed) -> None:
    _ends(keyed.by_flag, signal.SIGTERM)


def test_sigint_ends_it_all(keyed: Keyed) -> None:
    _ends(keyed.by_environment, signal.SIGINT)

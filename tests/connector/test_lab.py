"""Every fault that ends an unguarded PD, on real vLLM with the guard: `ECCON_LAB=DIR pytest tests/connector`.

That each of them does end an unguarded one is what tests/contract/test_faults.py shows on the same lab.
"""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import zmq

from tests.connector.lab import GuardedLab
from tests.contract.client import Reply, ask, fresh, get, part, text
from tests.contract.conftest import Cluster
from tests.contract.target import Server, free_port, until

pytestmark = [
    pytest.mark.skipif("ECCON_LAB" not in os.environ, reason="needs a lab: ECCON_LAB=DIR"),
    pytest.mark.timeout(900),
]
SOON_S = 1.5
"""A text meanwhile: 0.03 to 0.1 s on a quiet host."""
LOST = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedLab]:
    made = GuardedLab(tmp_path_factory.mktemp("guarded"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def shared_cluster(lab: GuardedLab) -> Cluster:
    return Cluster(lab)


@pytest.fixture
def guarded(shared_cluster: Cluster) -> Cluster:
    """A PD and two encoders, guarded; nobody of them was harmed for good by the test before."""
    shared_cluster.repair()
    return shared_cluster


def told(reply: Reply) -> dict[str, str]:
    """What an encoder's answer says of the push."""
    assert reply.status == 200, reply.body
    found: dict[str, str] = reply.json()["ec_transfer_params"]["ec_guard"]
    return found


def encode(encoder: Server, uuid: str, **more: Any) -> str:
    """Encode an image under this uuid; what became of it."""
    return told(ask(encoder, [part(uuid, **more)], max_tokens=1))[uuid]


def lost(reply: Reply, within: float) -> None:
    """One request failed, in time, and the engine did not."""
    assert (reply.status, reply.json()["error"]) == (500, LOST)
    assert reply.seconds < within


def lives(pd: Server) -> None:
    """It answers, at once."""
    words = ask(pd, "hello")
    assert words.status == 200
    assert words.seconds < SOON_S
    assert pd.alive()
    assert get(pd, "/health").status == 200


def pause(server: Server) -> None:
    server.signal(signal.SIGSTOP, everyone=True)


def resume(server: Server) -> None:
    server.signal(signal.SIGCONT, everyone=True)


def test_the_level_is_told_and_delivery_is_proven(guarded: Cluster) -> None:
    for server in (guarded.pd, *guarded.encoders):
        server.wait_log("EC guard: level=gate")
    u = fresh()
    assert encode(guarded.encoders[0], u) == "delivered"
    assert ask(guarded.pd, [part(u), text()]).status == 200


def test_an_item_that_nobody_encoded_fails_its_request_alone(guarded: Cluster) -> None:
    with ThreadPoolExecutor(2) as pool:
        missing = pool.submit(ask, guarded.pd, [part(fresh()), text()])
        stream = pool.submit(ask, guarded.pd, [part(fresh()), text()], stream=True)
        until(lambda: not missing.done(), 5, "")
        while not missing.done():
            lives(guarded.pd)
        lost(missing.result(), 5)
        assert missing.result().seconds > 2.9
        *events, done = stream.result().events()
    assert done == "[DONE]"
    assert all(json.loads(e)["choices"][0]["finish_reason"] is None for e in events)
    lives(guarded.pd)


def test_a_request_may_say_how_long_it_waits(guarded: Cluster) -> None:
    short = ask(guarded.pd, [part(fresh()), text()], ec_transfer_params={"ec_guard_wait_s": 0.2})
    lost(short, 2)


def test_an_encoder_killed_after_its_item_was_pulled(guarded: Cluster) -> None:
    first, second = guarded.encoders
    u, other = fresh(), fresh()
    url = part()["image_url"]["url"]
    assert encode(first, u, url=url) == "delivered"
    first.destroy()
    lives(guarded.pd)
    assert ask(guarded.pd, [part(u, url=url), text()]).status == 200
    assert encode(second, other) == "delivered"
    assert ask(guarded.pd, [part(other), text()]).status == 200


def test_an_encoder_killed_before_its_item_was_pulled(guarded: Cluster) -> None:
    first, pd, u = guarded.encoders[0], guarded.pd, fresh()
    pause(pd)
    try:
        assert encode(first, u) == "pushed"
        first.destroy()
    finally:
        resume(pd)
    lives(pd)
    lost(ask(pd, [part(u), text()]), 5)
    lives(pd)


def test_a_stopped_encoder_stalls_nobody_and_is_used_again(guarded: Cluster) -> None:
    first, second = guarded.encoders
    pd, u = guarded.pd, fresh()
    pause(pd)
    try:
        assert encode(first, u) == "pushed"
        pause(first)
    finally:
        resume(pd)
    try:
        with ThreadPoolExecutor(1) as pool:
            item = pool.submit(ask, pd, [part(u), text()])
            while not item.done():
                lives(pd)
        lost(item.result(), 5)
        other = fresh()
        assert encode(second, other) == "delivered"
        assert ask(pd, [part(other), text()]).status == 200
    finally:
        resume(first)
    later = fresh()
    until(lambda: encode(first, fresh()) == "delivered", 30, "it does not come back")
    assert encode(first, later) == "delivered"
    assert ask(pd, [part(later), text()]).status == 200


def test_an_entry_that_was_evicted_or_reused_is_never_another_image(lab: GuardedLab) -> None:
    port = free_port()
    pd = lab.pd(port)
    encoder = lab.encoder(port, producer_cache_capacity=1)
    with lab.lent(pd, encoder):
        assert encode(encoder, fresh()) == "delivered"
        for _ in range(3):
            gone, kept = fresh(), fresh()
            pause(pd)
            try:
                assert encode(encoder, gone) == "pushed"
                assert encode(encoder, kept) == "pushed"
            finally:
                resume(pd)
            lost(ask(pd, [part(gone), text()]), 5)
            assert ask(pd, [part(kept), text()]).status == 200
            lives(pd)


def test_junk_with_valid_framing_on_the_pull_port(guarded: Cluster) -> None:
    info = {"base_addr": 4096, "nbytes": 64, "device_id": 0, "shape": [1, 32], "dtype_str": "torch.float16"}
    message = {"engine_id": "x", "mm_hash": "h", "agent_metadata": b"junk", "tensor": info}
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://127.0.0.1:{guarded.pull_port}")
        for raw in (
            b"junk",
            msgspec.msgpack.encode(message),
            msgspec.msgpack.encode(message | {"ack_host": "no such host", "ack_port": 70000}),
            msgspec.msgpack.encode(message | {"tensor": info | {"nbytes": 2**62}}),
        ):
            push.send(raw)
        guarded.pd.wait_log("EC guard: mm_hash=h is lost")
        lives(guarded.pd)
    u = fresh()
    assert encode(guarded.encoders[0], u) == "delivered"
    assert ask(guarded.pd, [part(u), text()]).status == 200


def test_a_held_item_comes_again_after_a_restart_of_the_pd(guarded: Cluster) -> None:
    encoder, pd, u = guarded.encoders[0], guarded.pd, fresh()
    url = part()["image_url"]["url"]
    pause(pd)
    try:
        assert encode(encoder, u, url=url) == "pushed"
    finally:
        resume(pd)
    guarded.restart_pd()
    assert encode(encoder, u, url=url) == "delivered"
    assert ask(guarded.pd, [part(u, url=url), text()]).status == 200


def test_without_a_pd_an_encoder_encodes_nothing_in_vain(lab: GuardedLab) -> None:
    encoder = lab.encoder(free_port())
    with lab.lent(encoder):
        u = fresh()
        with ThreadPoolExecutor(1) as pool:
            item = pool.submit(ask, encoder, [part(u)], max_tokens=1)
            lives(encoder)
            lost(item.result(), 5)
        assert not encoder.events(u)
        lives(encoder)


def test_the_same_image_in_every_turn_is_pushed_again(guarded: Cluster) -> None:
    encoder, u = guarded.encoders[0], fresh()
    url = part()["image_url"]["url"]
    answers = []
    for _ in range(4):
        assert encode(encoder, u, url=url) == "delivered"
        answers.append(ask(guarded.pd, [part(u, url=url), text()], logprobs=True, top_logprobs=3).answer())
    assert answers.count(answers[0]) == 4

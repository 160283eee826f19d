"""Every fault that ends an unguarded PD, with the guard. On the stand-in, or with ECCON_LAB=DIR on real vLLM.

That each of them does end an unguarded one is what test_stall.py and test_deaths.py in tests/contract show.
In order: what kills servers comes last, since a start takes its time there.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from tests.connector.guarded import GuardedCluster, GuardedLab, GuardedSim, GuardedTarget, encode
from tests.contract.client import Reply, ask, fresh, get, part, text
from tests.contract.target import Server, until

pytestmark = pytest.mark.timeout(900 if "ECCON_LAB" in os.environ else 120)
SOON_S = 1.5
"""A text meanwhile: 0.03 to 0.1 s on a quiet host."""
LOST = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedCluster]:
    directory = tmp_path_factory.mktemp("guarded")
    lab: GuardedTarget = GuardedLab(directory) if "ECCON_LAB" in os.environ else GuardedSim(directory)
    try:
        yield GuardedCluster(lab)
    finally:
        lab.close()


@pytest.fixture
def cluster(started: GuardedCluster) -> GuardedCluster:
    """Everybody guarded, alive and well."""
    started.settle()
    return started


def lost(reply: Reply, within: float) -> None:
    """One request failed, in time, and the engine did not."""
    assert (reply.status, reply.json()["error"]) == (500, LOST)
    assert reply.seconds < within
    print(f"lost after {reply.seconds:.2f} s")


def lives(server: Server) -> None:
    """It answers, at once."""
    words = ask(server, "hello", max_tokens=1)
    assert words.status == 200
    assert words.seconds < SOON_S
    assert server.alive()
    assert get(server, "/health").status == 200
    print(f"text after {words.seconds:.2f} s")


def url() -> str:
    """Of a picture like no other."""
    found: str = part()["image_url"]["url"]
    return found


def pause(server: Server) -> None:
    """Stop it, and wait until it has: a process stops when one of its threads gets to run, not before."""
    server.signal(signal.SIGSTOP, everyone=True)
    until(lambda: {p.status() for p in server.family()} == {psutil.STATUS_STOPPED}, 30, "it does not stop")


def resume(server: Server) -> None:
    server.signal(signal.SIGCONT, everyone=True)


def test_the_level_is_told_and_delivery_is_proven(cluster: GuardedCluster) -> None:
    for server in (cluster.pd, cluster.first, cluster.small):
        server.wait_log("EC guard: level=gate")
    u = fresh()
    assert encode(cluster.first, u) == "delivered"
    assert ask(cluster.pd, [part(u), text()]).status == 200


def test_an_item_that_nobody_encoded_fails_its_request_alone(cluster: GuardedCluster) -> None:
    with ThreadPoolExecutor(2) as pool:
        missing = pool.submit(ask, cluster.pd, [part(fresh()), text()])
        stream = pool.submit(ask, cluster.pd, [part(fresh()), text()], stream=True)
        while not missing.done():
            lives(cluster.pd)
        lost(missing.result(), 5)
        assert missing.result().seconds > cluster.lab.wait_s * 0.95
        *events, done = stream.result().events()
    assert done == "[DONE]"
    assert all(json.loads(e)["choices"][0]["finish_reason"] is None for e in events)
    lives(cluster.pd)


def test_a_request_may_say_how_long_it_waits(cluster: GuardedCluster) -> None:
    lost(ask(cluster.pd, [part(fresh()), text()], ec_transfer_params={"ec_guard_wait_s": 0.2}), 2)


def test_junk_with_valid_framing_on_the_pull_port(cluster: GuardedCluster) -> None:
    info = {"base_addr": 4096, "nbytes": 64, "device_id": 0, "shape": [1, 32], "dtype_str": "torch.float16"}
    message = {"engine_id": "x", "mm_hash": "h", "agent_metadata": b"junk", "tensor": info}
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://127.0.0.1:{cluster.pull_port}")
        for raw in (
            b"junk",
            msgspec.msgpack.encode(message),
            msgspec.msgpack.encode(message | {"ack_host": "no such host", "ack_port": 70000}),
            msgspec.msgpack.encode(message | {"tensor": info | {"nbytes": 2**62}}),
        ):
            push.send(raw)
        cluster.pd.wait_log("EC guard: mm_hash=h is lost")
        lives(cluster.pd)
    u = fresh()
    assert encode(cluster.first, u) == "delivered"
    assert ask(cluster.pd, [part(u), text()]).status == 200


def test_the_same_image_in_every_turn_is_pushed_again(cluster: GuardedCluster) -> None:
    u, picture = fresh(), url()
    answers = []
    for _ in range(4):
        assert encode(cluster.first, u, url=picture) == "delivered"
        reply = ask(cluster.pd, [part(u, url=picture), text()], logprobs=True, top_logprobs=3)
        answers.append(reply.answer())
    assert answers.count(answers[0]) == 4


def test_one_identity_for_one_image_is_that_image_whatever_happens(cluster: GuardedCluster) -> None:
    """Encoded by both encoders, evicted between, asked for by many at once: never missing, never another."""
    known: dict[str, Any] = {}
    pictures = {fresh(): url() for _ in range(2)}

    def turn(u: str, encoder: Server) -> None:
        for _ in range(2):  # one that another's eviction overtook is sent again, as the proxy does it
            if (word := encode(encoder, u, url=pictures[u])) == "delivered":
                break
        assert word == "delivered"
        reply = ask(cluster.pd, [part(u, url=pictures[u]), text()], logprobs=True, top_logprobs=3)
        answer = reply.answer()
        assert known.setdefault(u, answer) == answer

    a, b = pictures
    for encoder, u in (
        (cluster.first, a), (cluster.first, a), (cluster.small, a), (cluster.small, b), (cluster.small, a),
        (cluster.first, b), (cluster.small, b), (cluster.first, a),
    ):  # fmt: skip
        turn(u, encoder)
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(turn, (a, b)[n % 2], (cluster.first, cluster.small)[n // 2 % 2]) for n in range(24)
        ]
        for job in jobs:
            job.result()
    began = time.monotonic()
    assert encode(cluster.first, a, url=pictures[a]) == "delivered"
    print(f"a repeated image costs {time.monotonic() - began:.3f} s at its encoder")
    lives(cluster.pd)


def test_an_entry_that_was_evicted_or_reused_is_never_another_image(cluster: GuardedCluster) -> None:
    for _ in range(3):
        gone, kept = fresh(), fresh()
        pause(cluster.pd)
        try:
            assert encode(cluster.small, gone) == "pushed"
            assert encode(cluster.small, kept) == "pushed"
        finally:
            resume(cluster.pd)
        lost(ask(cluster.pd, [part(gone), text()]), 5)
        assert ask(cluster.pd, [part(kept), text()]).status == 200
        lives(cluster.pd)


def test_a_stopped_encoder_stalls_nobody_and_is_used_again(cluster: GuardedCluster) -> None:
    pd, u = cluster.pd, fresh()
    pause(pd)
    try:
        assert encode(cluster.first, u) == "pushed"
        pause(cluster.first)
    finally:
        resume(pd)
    try:
        with ThreadPoolExecutor(1) as pool:
            item = pool.submit(ask, pd, [part(u), text()])
            while not item.done():
                lives(pd)
        lost(item.result(), 5)
        other = fresh()
        assert encode(cluster.small, other) == "delivered"
        assert ask(pd, [part(other), text()]).status == 200
    finally:
        resume(cluster.first)
    until(lambda: encode(cluster.first, fresh()) == "delivered", 60, "it does not come back")
    later = fresh()
    assert encode(cluster.first, later) == "delivered"
    assert ask(pd, [part(later), text()]).status == 200


def test_an_encoder_killed_after_its_item_was_pulled(cluster: GuardedCluster) -> None:
    u, other, picture = fresh(), fresh(), url()
    assert encode(cluster.small, u, url=picture) == "delivered"
    cluster.small.destroy()
    lives(cluster.pd)
    assert ask(cluster.pd, [part(u, url=picture), text()]).status == 200
    assert encode(cluster.first, other) == "delivered"
    assert ask(cluster.pd, [part(other), text()]).status == 200


def test_an_encoder_killed_before_its_item_was_pulled(started: GuardedCluster) -> None:
    pd, u = started.pd, fresh()
    pause(pd)
    try:
        assert encode(started.first, u) == "pushed"
        started.first.destroy()
    finally:
        resume(pd)
    lives(pd)
    lost(ask(pd, [part(u), text()]), 5)
    lives(pd)


def test_a_held_item_comes_again_after_a_restart_of_the_pd(cluster: GuardedCluster) -> None:
    encoder, u, picture = cluster.first, fresh(), url()

    def answer() -> Any:
        return ask(cluster.pd, [part(u, url=picture), text()], logprobs=True, top_logprobs=3).answer()

    assert encode(encoder, u, url=picture) == "delivered"
    before = answer()
    pause(cluster.pd)
    assert encode(encoder, u, url=picture) == "pushed"
    cluster.pd.destroy()
    encoder.wait_log("EC guard: the way to the PD at [^ ]+ is closed")
    # Without a PD nothing is encoded in vain, and nobody waits for it.
    with ThreadPoolExecutor(1) as pool:
        new = fresh()
        item = pool.submit(ask, encoder, [part(new)], max_tokens=1)
        lives(encoder)
        lost(item.result(), 5)
        assert not encoder.events(new)
    cluster.pd = cluster.lab.pd(cluster.pull_port)
    cluster.pd.wait_ready()
    until(lambda: encode(encoder, u, url=picture) == "delivered", 60, "it is not pushed again")
    assert answer() == before

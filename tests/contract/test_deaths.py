"""An encoder dies, hangs or forgets: when that takes the PD along, when not, and when nobody notices."""

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

import pytest

from tests.contract.client import Reply, ask, fresh, get, image, part, png, text
from tests.contract.cluster import Cluster, dead_answer, dies, encode, forgetful, gone, victim
from tests.contract.target import Server, Target, until

PICTURES = {"A": (200, 40, 30), "B": (20, 60, 220), "C": (9, 9, 9), "D": (99, 9, 99), "E": (9, 99, 9)}


def _same_image_again(cluster: Cluster, names: dict[str, str | None]) -> tuple[object, object, object] | None:
    """A, B at one encoder, others at the other, A again: the answers to A, B and A.

    None when the acknowledgement of A came after B had got its place: then nothing can be said.
    """
    first, second = cluster.encoders
    shift = hash(fresh()) % 40
    pictures = {k: image(png(1024, 768, (r + shift, g + shift, b))) for k, (r, g, b) in PICTURES.items()}

    def encoded(encoder: Server, key: str) -> None:
        assert ask(encoder, [part(names.get(key), pictures[key])], max_tokens=1).status == 200

    def answer(key: str) -> object:
        options: dict[str, Any] = {
            "max_tokens": 30,
            "logprobs": True,
            "top_logprobs": 3,
            "cache_salt": fresh(),
        }
        return ask(cluster.pd, [part(names.get(key), pictures[key]), text()], **options).answer()

    encoded(first, "A")
    a = answer("A")
    name = first.events("registered + pushed")[-1].rpartition("=")[2]
    encoded(first, "B")
    if not any(name in e and "evicting" in e for e in first.events("ACK status=ok")):
        return None
    b = answer("B")
    for key in "CDE":
        encoded(second, key)
        answer(key)
    if "A" in names:
        names["A"] = fresh()
    encoded(first, "A")
    return a, b, answer("A")


@pytest.mark.parametrize("fresh_names", [False, True], ids=["by content", "fresh names"])
def test_the_wrong_image_without_any_error(cluster: Cluster, fresh_names: bool) -> None:
    """The encoder still has A, so it does not push; the PD let go of A, and reads where A was: B is there.

    With a name of its own for every attempt it is pushed again, and right.
    """
    for _ in range(5):
        names = dict.fromkeys(PICTURES, "") if fresh_names else {}
        told = _same_image_again(cluster, {k: fresh() for k in names})
        if told is not None:
            break
    assert told is not None
    a, b, again = told
    assert a != b
    assert again == (a if fresh_names else b)


@dataclass
class Killed:
    """An encoder, while it encoded; what it had pushed before, its PD has heard of and not asked for."""

    encoder: Server
    pd: Server
    pushed: str
    lost: Exception | Reply
    """What became of the request that it was at."""


@pytest.fixture(scope="module")
def killed(shared: Cluster) -> Killed:
    shared.repair()
    encoder, pd, u = shared.special(victim), shared.pd, fresh()
    encode(encoder, u)
    pd.wait_event(f"received metadata for mm_hash={u}")
    assert ask(pd, "flush", max_tokens=1).status == 200
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(ask, encoder, [part(fresh(), image(png(2000, 2000)))])
        until(lambda: get(encoder, "/load").json() == {"server_load": 1}, 5, "the request does not arrive")
        pushed = len(encoder.events("pushed"))
        encoder.destroy()
        try:
            lost: Exception | Reply = one.result()
        except (HTTPException, ConnectionError) as e:
            lost = e
    assert len(encoder.events("pushed")) == pushed
    return Killed(encoder, pd, u, lost)


def test_an_encoder_killed_while_encoding_fails_its_request_alone(killed: Killed) -> None:
    assert isinstance(killed.lost, Exception)
    assert ask(killed.pd, "hello").status == 200


def test_after_a_flush_an_encoder_may_die(shared: Cluster, killed: Killed) -> None:
    for _ in range(3):
        assert ask(killed.pd, "hello").status == 200
    other = fresh()
    encode(shared.encoders[1], other)
    assert ask(killed.pd, [part(other), text()]).status == 200


def test_an_item_of_an_encoder_that_died_after_the_flush_kills(killed: Killed) -> None:
    dead_answer(dies(killed.pd, [part(killed.pushed), text()]))
    gone(killed.pd)


@pytest.fixture
def hoard(cluster: Cluster) -> Server:
    """The encoder that holds one item, for two seconds."""
    return cluster.special(forgetful)


def test_items_grow_too_old_once_another_is_taken_in(target: Target, cluster: Cluster, hoard: Server) -> None:
    encoder, u = hoard, fresh()
    encode(encoder, u)
    time.sleep(target.protocol_s(2.5))
    assert not encoder.events(f"TTL-evicting producer cache for mm_hash={u}")
    encode(encoder, fresh())
    encoder.wait_event(f"TTL-evicting producer cache for mm_hash={u} (ttl=2.0s")
    assert ask(cluster.pd, "flush", max_tokens=1).status == 200


def test_an_evicted_item_kills(cluster: Cluster, hoard: Server) -> None:
    encoder, pd = hoard, cluster.pd
    line = re.compile(r"LRU-evicting producer cache for mm_hash=(item-\w+) \(capacity=1 reached\)")
    before = len(encoder.events("LRU-evicting"))
    for _ in range(50):  # on a busy machine an item may grow too old before the next one comes
        last = fresh()
        encode(encoder, last)
        if found := encoder.events("LRU-evicting")[before:]:
            break
    evicted = line.match(found[-1])
    assert evicted is not None
    pd.wait_event(f"received metadata for mm_hash={last}")
    dead_answer(dies(pd, [part(evicted[1]), text()]))
    gone(pd)
    assert "NIXL_ERR_NOT_FOUND" in pd.log()


def test_an_encoder_killed_after_its_push_takes_the_pd_along(cluster: Cluster, hoard: Server) -> None:
    """At its next step, whatever that is for."""
    encoder, pd, u = hoard, cluster.pd, fresh()
    encode(encoder, u)
    pd.wait_event(f"received metadata for mm_hash={u}")
    cluster.dismiss(forgetful)
    reply = dies(pd, "only text")
    dead_answer(reply)
    assert reply is None or reply.seconds < 5
    gone(pd)
    assert "NIXL_ERR_BACKEND" in pd.log()


def test_more_items_than_may_be_pulled_at_once_kill(shared: Cluster) -> None:
    shared.restart_pd(max_concurrent_pulls=2)
    pd = shared.pd
    two, three = [fresh() for _ in range(2)], [fresh() for _ in range(3)]
    for u in (*two, *three):
        encode(shared.encoders[0], u)
    assert ask(pd, [*map(part, two), text()]).status == 200
    dead_answer(dies(pd, [*map(part, three), text()]))
    gone(pd)
    assert re.search(r"Encoder cache miss for item-[0-9a-f]{12}\.", pd.log())


def test_a_stopped_encoder_blocks_the_pull_and_then_kills(
    cluster: Cluster, wanted: frozenset[str], request: pytest.FixtureRequest
) -> None:
    encoder, pd, u = cluster.encoders[0], cluster.pd, fresh()
    wait_s = cluster.target.protocol_s(30.0)
    encode(encoder, u)
    pd.wait_event(f"received metadata for mm_hash={u}")
    encoder.signal(signal.SIGSTOP, everyone=True)
    try:
        with ThreadPoolExecutor(2) as pool:
            item = pool.submit(ask, pd, [part(u), text()])
            pd.wait_event(f"initiated pull for mm_hash={u}")
            words = pool.submit(ask, pd, "Hello")
            if "starts" in wanted:  # by later tests: half a minute is lost here anyway
                request.getfixturevalue("starts")
            dead_answer(item.result())
            dead_answer(words.result())
            assert item.result().seconds > wait_s * 0.9
    finally:
        encoder.signal(signal.SIGCONT, everyone=True)
    assert pd.events("1 pulls did not complete within timeout")
    gone(pd)

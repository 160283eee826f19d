"""A PD dies, its encoders live on; an item that nobody sent the next one stalls everybody, and kills it."""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException

import msgspec
import pytest
import zmq

from tests.contract.client import Reply, ask, fresh, get, image, metric, part, post, text
from tests.contract.cluster import DEAD, SPECIAL, Cluster, dead_answer, dies, encode, gone
from tests.contract.target import Server, Target, until


@dataclass
class Lives:
    """Two of the PD, and what its first encoder knew between them."""

    junk_answer: Reply | None
    """Of the first, to a request of text once junk had come where an agent should be."""
    first: Server
    second: Server
    held: str
    """Encoded, and pushed to the first life, which did not ask for it."""
    contacts: int
    """How many PDs the encoder had been in contact with."""


@pytest.fixture(scope="module")
def lives(shared: Cluster) -> Lives:
    """The first one ends by junk; with the guarded connector, which bears that, it is killed."""
    shared.repair()
    encoder, first, held, told = shared.encoders[0], shared.pd, fresh(), None
    encode(encoder, held)
    first.wait_event(f"received metadata for mm_hash={held}")
    contacts = len(encoder.events("first contact from consumer engine="))
    if shared.target.guarded:
        shared.restart_pd()
    else:
        told = _junk(shared)
        first.exit_code(30)
        shared.repair()
    return Lives(told, first, shared.pd, held, contacts)


def _junk(cluster: Cluster) -> Reply | None:
    push: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    push.connect(f"tcp://127.0.0.1:{cluster.pull_port}")
    tensor = {"base_addr": 4096, "nbytes": 64, "device_id": 0, "shape": [1, 32], "dtype_str": "torch.float16"}
    message = {"engine_id": fresh(), "mm_hash": fresh(), "agent_metadata": b"junk", "tensor": tensor}
    push.send(msgspec.msgpack.encode(message))
    cluster.pd.wait_event(f"received metadata for mm_hash={message['mm_hash']}")
    push.close()
    return dies(cluster.pd, "only text")


def test_junk_where_an_agent_should_be_kills(lives: Lives) -> None:
    dead_answer(lives.junk_answer)
    gone(lives.first)


def test_a_new_name_works_with_a_new_pd_which_the_encoder_notices(cluster: Cluster, lives: Lives) -> None:
    encoder, picture, u = cluster.encoders[0], image(), fresh()
    assert ask(encoder, [part(fresh(), picture)], max_tokens=1).status == 200
    assert ask(encoder, [part(u, picture)], max_tokens=1).status == 200
    assert ask(cluster.pd, [part(u, picture), text()]).status == 200
    until(
        lambda: len(encoder.events("first contact from consumer engine=")) > lives.contacts,
        10,
        "the new PD was not noticed",
    )


@dataclass
class Stall:
    """What came of it, seen from outside."""

    pd: Server
    never: str
    missing: Reply
    """To the request for `never`, an item that nobody has encoded."""
    held: Reply
    """To a stream for an item that its encoder holds, and did not push again to this PD."""
    words: Reply
    """To a request of text only."""
    looks: list[tuple[int, int]]
    """Statuses of /health and /metrics meanwhile."""
    gauges: list[tuple[float, float]]
    """Requests that run and that wait, as /metrics had them then."""


@pytest.fixture(scope="module")
def stall(shared: Cluster, lives: Lives, wanted: frozenset[str]) -> Stall:
    shared.repair()
    pd, never, wait_s = shared.pd, fresh(), shared.target.protocol_s(30.0)
    encode(shared.encoders[0], lives.held)
    looks, gauges = [], []
    with ThreadPoolExecutor(3) as pool:
        began = time.monotonic()
        missing = pool.submit(ask, pd, [part(never), text()])
        others: list[Future[Reply]] = []
        # Half a minute in which nothing happens here: what later tests want may start meanwhile.
        shared.ahead(*(kind for name, kind in SPECIAL.items() if name in wanted))
        while not missing.done():
            since = time.monotonic() - began
            try:
                look = get(pd, "/health").status, get(pd, "/metrics").status
                gauge = metric(pd, "vllm:num_requests_running"), metric(pd, "vllm:num_requests_waiting")
            except (HTTPException, ConnectionError):
                break
            if look[0] != 200 or missing.done():
                break
            looks.append(look)
            if since > wait_s / 4:
                gauges.append(gauge)
            if since > wait_s / 2 and not others:
                others = [pool.submit(_held, pd, lives.held), pool.submit(_first_unanswered, pd, "Hello")]
            time.sleep(wait_s / 20)
        held, words = (o.result() for o in others)
        return Stall(pd, never, missing.result(), held, words, looks, gauges)


def _held(pd: Server, uuid: str) -> Reply:
    content = [part(uuid), text()]
    return post(pd, {"messages": [{"role": "user", "content": content}], "stream": True})


def _first_unanswered(pd: Server, content: object) -> Reply:
    """Ask until it is not answered well: what was sent a moment later may still be served a moment before."""
    while (reply := ask(pd, content)).status == 200:
        pass
    return reply


def test_an_item_that_nobody_encoded_stalls_everybody_and_kills(target: Target, stall: Stall) -> None:
    wait_s = target.protocol_s(30.0)
    assert len(stall.looks) >= 5
    assert set(stall.looks) == {(200, 200)}
    dead_answer(stall.missing)
    assert wait_s * 0.9 < stall.missing.seconds < wait_s + 5
    dead_answer(stall.words)
    assert stall.pd.events(f"timed out waiting for mm_hash={stall.never} (30.0s)")
    assert stall.pd.events(f"mm_hash={stall.never} not available after timeout")
    assert f"Encoder cache miss for {stall.never}." in stall.pd.log()
    gone(stall.pd)


def test_metrics_are_frozen_in_a_stall(stall: Stall) -> None:
    assert stall.gauges
    assert set(stall.gauges) == {(0.0, 0.0)}


def test_a_held_item_is_not_pushed_to_a_new_pd(shared: Cluster, lives: Lives, stall: Stall) -> None:
    """So it is missing there as well; a stream of it has said 200 before that is known."""
    assert len(shared.encoders[0].events(f"pushed mm_hash={lives.held}")) == 1
    assert not stall.pd.events(f"received metadata for mm_hash={lives.held}")
    error, done = stall.held.events()
    told = json.loads(error)["error"]
    assert (stall.held.status, told["code"], told["message"], done) == (200, 500, DEAD, "[DONE]")

"""What kills a PD, what does not, and how its death looks from outside."""

import json
import re
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

import msgspec
import pytest
import zmq

from tests.contract.client import Reply, ask, fresh, get, image, metric, part, png, post, text
from tests.contract.conftest import Cluster
from tests.contract.target import Server, Target, free_port, until

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def _assert_dead_answer(reply: Reply) -> None:
    assert reply.status == 500, reply.body
    assert reply.error() == {"message": DEAD, "type": "InternalServerError", "param": None, "code": 500}


def _assert_gone(server: Server) -> None:
    """It exits by itself, with code 0 although it failed, and leaves nobody behind."""
    assert server.exit_code(30) == 0
    until(lambda: not server.family(), 10, "it left somebody behind")


def _encode(encoder: Server, uuid: str) -> None:
    assert ask(encoder, [part(uuid)], max_tokens=1).status == 200


def _dies(pd: Server, content: object) -> Reply | None:
    """Ask what kills it; its answer, or None when the connection broke."""
    try:
        return ask(pd, content)
    except (HTTPException, ConnectionError):
        return None


def _first_unanswered(pd: Server, content: object) -> Reply:
    """Ask until it is not answered well: what was sent a moment later may still be served a moment before."""
    while (reply := ask(pd, content)).status == 200:
        pass
    return reply


def test_an_item_that_nobody_encoded_stalls_everybody_and_kills(cluster: Cluster) -> None:
    pd, u = cluster.pd, fresh()
    wait_s = cluster.target.protocol_s(30.0)
    with ThreadPoolExecutor(3) as pool:
        missing: Future[Reply] = pool.submit(ask, pd, [part(u), text()])
        before = get(pd, "/metrics").status
        stream = pool.submit(ask, pd, [part(fresh()), text()], stream=True)
        words = pool.submit(_first_unanswered, pd, "Hello")
        looks = 0
        while not missing.done():
            try:
                healthy, known = get(pd, "/health"), get(pd, "/metrics")
            except (HTTPException, ConnectionError):
                break
            if healthy.status != 200 or missing.done():
                break
            assert known.status == before == 200
            assert b"\nvllm:num_requests_running{" in known.body
            looks += 1
            time.sleep(wait_s / 20)
        assert looks >= 5
        _assert_dead_answer(missing.result())
        assert wait_s * 0.9 < missing.result().seconds < wait_s + 5
        _assert_dead_answer(words.result())
        # A stream has said 200 before it knows.
        error, done = stream.result().events()
        assert (stream.result().status, json.loads(error)["error"]["message"], done) == (200, DEAD, "[DONE]")
    assert pd.events(f"timed out waiting for mm_hash={u} (30.0s)")
    assert pd.events(f"mm_hash={u} not available after timeout")
    assert f"Encoder cache miss for {u}." in pd.log()
    _assert_gone(pd)


def test_metrics_are_frozen_in_a_stall(cluster: Cluster) -> None:
    pd = cluster.pd
    with ThreadPoolExecutor(1) as pool:
        missing = pool.submit(_dies, pd, [part(fresh()), text()])
        time.sleep(cluster.target.protocol_s(30.0) / 3)
        if not missing.done():
            assert metric(pd, "vllm:num_requests_running") == 0
            assert metric(pd, "vllm:num_requests_waiting") == 0
    _assert_gone(pd)


def test_an_encoder_killed_after_its_push_takes_the_pd_along(cluster: Cluster) -> None:
    """At its next step, whatever that is for."""
    encoder, pd = cluster.encoders[0], cluster.pd
    u = fresh()
    _encode(encoder, u)
    pd.wait_event(f"received metadata for mm_hash={u}")
    encoder.destroy()
    reply = _dies(pd, "only text")
    if reply is not None:
        _assert_dead_answer(reply)
        assert reply.seconds < 5
    _assert_gone(pd)
    assert "NIXL_ERR_BACKEND" in pd.log()


def test_after_a_flush_an_encoder_may_die(cluster: Cluster) -> None:
    first, second = cluster.encoders
    pd, u, other = cluster.pd, fresh(), fresh()
    _encode(first, u)
    pd.wait_event(f"received metadata for mm_hash={u}")
    assert ask(pd, "flush", max_tokens=1).status == 200
    first.destroy()
    for _ in range(3):
        assert ask(pd, "hello").status == 200
    _encode(second, other)
    assert ask(pd, [part(other), text()]).status == 200


def test_an_encoder_killed_while_encoding_fails_its_request_alone(target: Target, cluster: Cluster) -> None:
    encoder = target.encoder(
        cluster.pull_port, "--enable-server-load-tracking", env={"ECCON_SIM_ENCODE_MS": "60000"}
    )
    with target.lent(encoder), ThreadPoolExecutor(1) as pool:
        big = image(png(2000, 2000))
        one = pool.submit(ask, encoder, [part(fresh(), big)])
        until(lambda: get(encoder, "/load").json() == {"server_load": 1}, 5, "the request does not arrive")
        encoder.destroy()
        with pytest.raises((HTTPException, ConnectionError)):
            one.result()
        assert not encoder.events("pushed")
        assert ask(cluster.pd, "hello").status == 200


def test_an_item_of_an_encoder_that_died_after_the_flush_kills(cluster: Cluster) -> None:
    encoder, pd, u = cluster.encoders[0], cluster.pd, fresh()
    _encode(encoder, u)
    pd.wait_event(f"received metadata for mm_hash={u}")
    assert ask(pd, "flush", max_tokens=1).status == 200
    encoder.destroy()
    reply = _dies(pd, [part(u), text()])
    if reply is not None:
        _assert_dead_answer(reply)
    _assert_gone(pd)


def test_a_stopped_encoder_blocks_the_pull_and_then_kills(cluster: Cluster) -> None:
    encoder, pd, u = cluster.encoders[0], cluster.pd, fresh()
    wait_s = cluster.target.protocol_s(30.0)
    _encode(encoder, u)
    pd.wait_event(f"received metadata for mm_hash={u}")
    encoder.signal(signal.SIGSTOP, everyone=True)
    try:
        with ThreadPoolExecutor(2) as pool:
            item = pool.submit(ask, pd, [part(u), text()])
            pd.wait_event(f"initiated pull for mm_hash={u}")
            words = pool.submit(ask, pd, "Hello")
            _assert_dead_answer(item.result())
            _assert_dead_answer(words.result())
            assert item.result().seconds > wait_s * 0.9
    finally:
        encoder.signal(signal.SIGCONT, everyone=True)
    assert pd.events("1 pulls did not complete within timeout")
    _assert_gone(pd)


def test_a_held_item_is_not_pushed_to_a_new_pd(cluster: Cluster) -> None:
    encoder, u = cluster.encoders[0], fresh()
    _encode(encoder, u)
    cluster.pd.wait_event(f"received metadata for mm_hash={u}")
    cluster.restart_pd()
    pd = cluster.pd
    _encode(encoder, u)
    assert len(encoder.events(f"pushed mm_hash={u}")) == 1
    reply = post(pd, {"messages": [{"role": "user", "content": [part(u), text()]}], "stream": True})
    error, done = reply.events()
    assert (reply.status, json.loads(error)["error"]["code"], done) == (200, 500, "[DONE]")
    _assert_gone(pd)


def test_a_new_name_works_with_a_new_pd_which_the_encoder_notices(cluster: Cluster) -> None:
    encoder, picture = cluster.encoders[0], image()
    _encode(encoder, fresh())
    contacts = len(encoder.events("first contact from consumer engine="))
    cluster.restart_pd()
    u = fresh()
    assert ask(encoder, [part(u, picture)], max_tokens=1).status == 200
    assert ask(cluster.pd, [part(u, picture), text()]).status == 200
    until(
        lambda: len(encoder.events("first contact from consumer engine=")) > contacts,
        10,
        "the new PD was not noticed",
    )


def test_an_encoder_may_start_before_its_pd(target: Target) -> None:
    port, u = free_port(), fresh()
    encoder = target.encoder(port)
    with target.lent(encoder):
        encoder.wait_log("is not accepting connections yet")
        _encode(encoder, u)
        pd = target.pd(port)
        with target.lent(pd):
            pd.wait_event(f"received metadata for mm_hash={u}")
            assert ask(pd, [part(u), text()]).status == 200


def test_an_evicted_item_kills(target: Target) -> None:
    port = free_port()
    pd = target.pd(port)
    with target.lent(pd):
        encoder = target.encoder(port, producer_cache_capacity=1)
        with target.lent(encoder):
            first, second = fresh(), fresh()
            _encode(encoder, first)
            _encode(encoder, second)
            encoder.wait_event(f"LRU-evicting producer cache for mm_hash={first} (capacity=1 reached)")
            pd.wait_event(f"received metadata for mm_hash={second}")
            reply = _dies(pd, [part(first), text()])
            if reply is not None:
                _assert_dead_answer(reply)
            _assert_gone(pd)
            assert "NIXL_ERR_NOT_FOUND" in pd.log()


def test_items_grow_too_old_once_another_is_taken_in(target: Target, cluster: Cluster) -> None:
    encoder = target.encoder(cluster.pull_port, producer_cache_ttl_s=2)
    with target.lent(encoder):
        u = fresh()
        _encode(encoder, u)
        time.sleep(target.protocol_s(2.5))
        assert not encoder.events("TTL-evicting")
        _encode(encoder, fresh())
        encoder.wait_event(f"TTL-evicting producer cache for mm_hash={u} (ttl=2.0s")
        assert ask(cluster.pd, "flush", max_tokens=1).status == 200


def test_more_items_than_may_be_pulled_at_once_kill(target: Target) -> None:
    port = free_port()
    pd = target.pd(port, max_concurrent_pulls=2)
    with target.lent(pd):
        encoder = target.encoder(port)
        with target.lent(encoder):
            two, three = [fresh() for _ in range(2)], [fresh() for _ in range(3)]
            for u in (*two, *three):
                _encode(encoder, u)
            assert ask(pd, [*map(part, two), text()]).status == 200
            reply = _dies(pd, [*map(part, three), text()])
            if reply is not None:
                _assert_dead_answer(reply)
            _assert_gone(pd)
            assert re.search(r"Encoder cache miss for item-[0-9a-f]{12}\.", pd.log())


def test_junk_where_an_agent_should_be_kills(cluster: Cluster) -> None:
    pd = cluster.pd
    push: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    push.connect(f"tcp://127.0.0.1:{cluster.pull_port}")
    tensor = {"base_addr": 4096, "nbytes": 64, "device_id": 0, "shape": [1, 32], "dtype_str": "torch.float16"}
    message = {"engine_id": fresh(), "mm_hash": fresh(), "agent_metadata": b"junk", "tensor": tensor}
    push.send(msgspec.msgpack.encode(message))
    pd.wait_event(f"received metadata for mm_hash={message['mm_hash']}")
    push.close()
    reply = _dies(pd, "only text")
    if reply is not None:
        _assert_dead_answer(reply)
    _assert_gone(pd)


PICTURES = {"A": (200, 40, 30), "B": (20, 60, 220), "C": (9, 9, 9), "D": (99, 9, 99), "E": (9, 99, 9)}


def _same_image_again(cluster: Cluster, names: dict[str, str | None]) -> tuple[object, object, object] | None:
    """A, B at one encoder, others at the other, A again: the answers to A, B and A.

    None when the acknowledgement of A came after B had got its place: then nothing can be said.
    """
    first, second = cluster.encoders
    shift = hash(fresh()) % 40
    pictures = {k: image(png(1024, 768, (r + shift, g + shift, b))) for k, (r, g, b) in PICTURES.items()}

    def encode(encoder: Server, key: str) -> None:
        assert ask(encoder, [part(names.get(key), pictures[key])], max_tokens=1).status == 200

    def answer(key: str) -> object:
        options: dict[str, Any] = {
            "max_tokens": 30,
            "logprobs": True,
            "top_logprobs": 3,
            "cache_salt": fresh(),
        }
        return ask(cluster.pd, [part(names.get(key), pictures[key]), text()], **options).answer()

    encode(first, "A")
    a = answer("A")
    name = first.events("registered + pushed")[-1].rpartition("=")[2]
    encode(first, "B")
    if not any(name in e and "evicting" in e for e in first.events("ACK status=ok")):
        return None
    b = answer("B")
    for key in "CDE":
        encode(second, key)
        answer(key)
    if "A" in names:
        names["A"] = fresh()
    encode(first, "A")
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


def test_sigterm_ends_it_all(target: Target) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        server = target.pd(free_port())
        server.wait_ready()
        server.signal(number)
        assert server.exit_code(20) == 0
        until(lambda: not server.family(), 5, "it left somebody behind")  # noqa: B023


def test_a_dead_engine_ends_the_server_with_code_0(target: Target) -> None:
    server = target.pd(free_port())
    server.wait_ready()
    server.engine().kill()
    statuses = set()
    while server.alive() and server.listening():
        try:
            statuses.add(get(server, "/health").status)
        except (HTTPException, ConnectionError):
            break
    assert statuses <= {200, 503}
    assert 503 in statuses
    _assert_gone(server)


def test_sigkill_leaves_an_orphan_that_keeps_the_connectors_port(target: Target) -> None:
    port = free_port()
    pd = target.pd(port)
    pd.wait_ready()
    engine = pd.engine()
    pd.signal(signal.SIGKILL)
    assert pd.exit_code(5) == -signal.SIGKILL
    assert not pd.listening()
    assert engine in pd.family()
    late = target.pd(port)
    assert late.exit_code(target.start_s) != 0
    assert "zmq.error.ZMQError: Address already in use" in late.log()
    until(lambda: not late.family(), 20, "the late one left somebody behind")
    assert engine in pd.family()
    engine.terminate()
    until(lambda: not pd.family(), 30, "the orphan does not heed SIGTERM")


def test_a_port_is_taken_before_it_listens(target: Target) -> None:
    """Bound first: a port that somebody holds alone is noticed at once, not after the model was loaded."""
    holder: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
    port = holder.bind_to_random_port("tcp://127.0.0.1")
    server = target.launch("pd", "ec_consumer", {"pull_port": free_port()}, port=port)
    assert server.exit_code(target.start_s) != 0
    assert "Address already in use" in server.log()
    assert "Initializing a V1 LLM engine" not in server.log()
    holder.close()


def test_no_such_model(target: Target) -> None:
    server = target.launch("pd", "ec_consumer", {"pull_port": free_port()}, model="/nowhere/at/all")
    assert server.exit_code(target.start_s) == 1
    until(lambda: not server.family(), 5, "it left somebody behind")


def test_an_unknown_flag(target: Target) -> None:
    server = target.pd(free_port(), "--no-such-flag", "1")
    assert server.exit_code(target.start_s) == 2
    assert "unrecognized arguments: --no-such-flag" in server.log()


def test_milestones_in_order(target: Target) -> None:
    port = free_port()
    server = target.pd(port)
    with target.lent(server):
        server.wait_log("Application startup complete")
        log = server.log()
    marks = [
        rf"version {re.escape(target.version)}",
        r"non-default args: \{",
        r"Resolved architecture: Qwen3VLForConditionalGeneration",
        r"Using max model len 4096",
        rf"\(EngineCore pid=\d+\) .*Initializing a V1 LLM engine \(v{re.escape(target.version)}\)",
        r"Creating connector with name: RblnECNixlConnector and engine_id: ",
        rf"RblnECNixlConnector \(llm\): PULL bound on tcp://127\.0\.0\.1:{port}",
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

"""Media items on their way: identity, the connector's lines in order, its messages on the wire."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq

from tests.contract.client import ask, fresh, image, part, png, text
from tests.contract.cluster import Cluster
from tests.contract.target import Server, Target, free_port, until


def test_eight_images_in_order(cluster: Cluster) -> None:
    """Encoded on two encoders in turn, answered by a PD; the same in another order is another answer."""
    pictures = [image(png(64 + 32 * i, 96, (30 * i, 255 - 30 * i, 77))) for i in range(8)]
    ids = [fresh() for _ in pictures]
    parts = [part(u, p) for u, p in zip(ids, pictures, strict=True)]
    for i, one in enumerate(parts):
        assert ask(cluster.encoders[i % 2], [one], max_tokens=1).status == 200
    options: dict[str, Any] = {"max_tokens": 200, "logprobs": True, "top_logprobs": 2}
    first = ask(cluster.pd, [*parts, text()], **options).answer()
    swapped = ask(cluster.pd, [*reversed(parts), text()], **options).answer()
    assert first != swapped
    assert ask(cluster.pd, [*parts, text()], cache_salt=fresh(), **options).answer() == first


def test_the_lines_of_one_item_in_order(cluster: Cluster) -> None:
    u = fresh()
    encoder, pd = cluster.encoders[0], cluster.pd
    assert ask(encoder, [part(u)], max_tokens=1).status == 200
    encoder.wait_event(f"registered + pushed mm_hash={u}")
    pd.wait_event(f"received metadata for mm_hash={u} from engine=")
    assert not pd.events(f"initiated pull for mm_hash={u}")
    assert ask(pd, [part(u), text()]).status == 200
    pd.wait_event(f"pull complete for mm_hash={u}")
    said = [re.sub(r"engine=[0-9a-f-]{36}", "engine=E", e) for e in pd.events(u)]
    assert said == [
        f"received metadata for mm_hash={u} from engine=E",
        f"registered remote agent for engine=E, mm_hash={u}",
        f"initiated pull for mm_hash={u}",
        f"pull complete for mm_hash={u}",
    ]
    # The acknowledgement is looked at when another new item is taken in, not before.
    assert not encoder.events(f"ACK status=ok for mm_hash={u}")
    until(
        lambda: bool(_encode(encoder) and encoder.events(f"ACK status=ok for mm_hash={u}, evicting")),
        10,
        "no ACK",
    )
    assert encoder.events("first contact from consumer engine=")
    assert pd.events("discovered encoder engine=")


def _encode(encoder: Server) -> bool:
    return ask(encoder, [part(fresh())], max_tokens=1).status == 200


def test_a_line_says_when_to_the_microsecond_and_where(cluster: Cluster) -> None:
    u = fresh()
    ask(cluster.encoders[0], [part(u)], max_tokens=1)
    cluster.encoders[0].wait_event(u)
    line = next(x for x in cluster.encoders[0].log().splitlines() if u in x and "pushed" in x)
    logger = r"vllm_rbln\.distributed\.ec_transfer\.ec_connector\.rbln_ec_nixl_connector"
    process = r"\((?:EngineCore|Worker) pid=\d+\) "
    assert re.match(rf"{process}\d{{10}}\.\d{{6}} DEBUG \d+ \w+ {logger}:\d+ EC Nixl: ", line)


def test_any_uuid_is_the_name_verbatim(cluster: Cluster) -> None:
    u = fresh() + " 한글 /../x [b]%s"
    assert ask(cluster.encoders[0], [part(u)], max_tokens=1).status == 200
    cluster.encoders[0].wait_event(f"registered + pushed mm_hash={u}")
    assert ask(cluster.pd, [part(u), text()]).status == 200
    cluster.pd.wait_event(f"pull complete for mm_hash={u}")


def test_a_new_uuid_is_encoded_and_pushed_again_and_a_held_one_is_not(cluster: Cluster) -> None:
    encoder, picture = cluster.encoders[0], image()
    first, second = fresh(), fresh()
    for u in (first, first, second, first):
        assert ask(encoder, [part(u, picture)], max_tokens=1).status == 200
    encoder.wait_event(f"pushed mm_hash={second}")
    assert len(encoder.events(f"pushed mm_hash={first}")) == 1
    assert len(encoder.events(f"pushed mm_hash={second}")) == 1


def test_the_same_uuid_on_other_bytes_is_the_first_picture(cluster: Cluster) -> None:
    encoder, pd, u = cluster.encoders[0], cluster.pd, fresh()
    red, blue = image(png(64, 64, (250, 0, 0))), image(png(64, 64, (0, 0, 250)))
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 40}
    for picture in (red, blue):
        assert ask(encoder, [part(u, picture)], max_tokens=1).status == 200
    told_red = ask(pd, [part(u, blue), text()], **options).answer()
    other = fresh()
    assert ask(encoder, [part(other, red)], max_tokens=1).status == 200
    assert ask(pd, [part(other, red), text()], **options).answer() == told_red
    encoder.wait_event(f"pushed mm_hash={u}")
    assert len(encoder.events(f"pushed mm_hash={u}")) == 1


def test_null_payloads(cluster: Cluster) -> None:
    encoder, pd, u = cluster.encoders[0], cluster.pd, fresh()
    nothing: dict[str, Any] = {"type": "image_url", "image_url": None}
    for server in (encoder, pd):
        reply = ask(server, [nothing | {"uuid": fresh()}])
        assert reply.status == 400
        assert reply.error()["message"] == "Cache miss for image at index 0 but data is not provided."
    assert ask(encoder, [part(u)], max_tokens=1).status == 200
    assert ask(encoder, [nothing | {"uuid": u}], max_tokens=1).status == 200
    assert ask(pd, [part(u), text()]).status == 200
    assert ask(pd, [nothing | {"uuid": u}, text()]).status == 200


def test_request_kwargs_are_in_the_name(cluster: Cluster) -> None:
    """With them the uuid is no more the name, but both sides make the same of it. Or they are refused."""
    encoder, pd, u = cluster.encoders[0], cluster.pd, fresh()
    kwargs: dict[str, Any] = {"mm_processor_kwargs": {"max_pixels": 200_704}}
    if cluster.target.release.trusting:
        for server in (encoder, pd):
            for key in ("mm_processor_kwargs", "media_io_kwargs"):
                option: dict[str, Any] = {key: {"image": {"x": 1}}}
                reply = ask(server, [part(u)], max_tokens=1, **option)
                assert (reply.status, reply.error()["param"]) == (400, key)
        return
    before = len(encoder.events("pushed"))
    assert ask(encoder, [part(u)], max_tokens=1, **kwargs).status == 200
    until(lambda: len(encoder.events("pushed")) == before + 1, 5, "nothing was pushed")
    name = encoder.events("pushed")[-1].rpartition("=")[2]
    assert re.fullmatch("[0-9a-f]{64}", name)
    assert ask(pd, [part(u), text()], **kwargs).status == 200
    pd.wait_event(f"pull complete for mm_hash={name}")


def test_without_uuid_the_bytes_are_the_name(cluster: Cluster) -> None:
    encoder, pd, picture = cluster.encoders[0], cluster.pd, image()
    before = len(encoder.events("pushed"))
    for _ in range(2):
        assert ask(encoder, [part(None, picture)], max_tokens=1).status == 200
    until(lambda: len(encoder.events("pushed")) == before + 1, 5, "nothing was pushed")
    name = encoder.events("pushed")[-1].rpartition("=")[2]
    assert re.fullmatch("[0-9a-f]{64}", name)
    assert ask(pd, [part(None, picture), text()]).status == 200
    pd.wait_event(f"pull complete for mm_hash={name}")


def test_remote_pictures(cluster: Cluster, pictures: str) -> None:
    u, encoder = fresh(), cluster.encoders[0]
    one = part(u, f"{pictures}/a.png")
    assert ask(encoder, [one], max_tokens=1).status == 200
    assert ask(cluster.pd, [one, text()]).status == 200
    cluster.pd.wait_event(f"pull complete for mm_hash={u}")
    assert ask(encoder, [part(None, f"{pictures}/gone")], max_tokens=1).status == 422


@dataclass
class Lone:
    """An encoder without processor cache, and the port where it looks for a PD, which a test is, if any."""

    encoder: Server
    port: int


@pytest.fixture(scope="module")
def lone(target: Target) -> Iterator[Lone]:
    port = free_port()
    encoder = target.encoder(port, "--mm-processor-cache-gb", "0", *target.release.trusting)
    with target.lent(encoder):
        yield Lone(encoder, port)


@pytest.fixture
def pull() -> "Iterator[zmq.Socket[bytes]]":
    """A PD that is only a socket."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    yield socket
    context.destroy(linger=0)


def test_the_65th_message_without_a_pd_blocks(lone: Lone, pull: "zmq.Socket[bytes]") -> None:
    encoder = lone.encoder
    encoder.wait_log("is not accepting connections yet")
    before, small = len(encoder.events("pushed")), image(png(8, 8))
    for _ in range(64):
        assert ask(encoder, [part(fresh(), small)], max_tokens=1).status == 200
    for content in ([part(fresh(), small)], "only text"):
        with pytest.raises(TimeoutError):
            ask(encoder, content, max_tokens=1, timeout=1.5)
    assert len(encoder.events("pushed")) - before == 64
    pull.bind(f"tcp://127.0.0.1:{lone.port}")
    names = [msgspec.msgpack.decode(pull.recv())["mm_hash"] for _ in range(65)]
    assert len(set(names)) == 65
    assert ask(encoder, "only text", max_tokens=1, timeout=20).status == 200


def test_the_messages_of_an_encoder(lone: Lone, pull: "zmq.Socket[bytes]") -> None:
    encoder = lone.encoder
    pull.bind(f"tcp://127.0.0.1:{lone.port}")
    encoder.wait_log(f"PUSH connected to tcp://127.0.0.1:{lone.port}")
    encoder.wait_log(r"ACK PULL bound on 127\.0\.0\.1:\d+")
    first, second = fresh(), fresh()
    assert ask(encoder, [part(first, image(png(64, 64)))], max_tokens=1).status == 200
    message = msgspec.msgpack.decode(pull.recv())
    assert set(message) == {"engine_id", "mm_hash", "agent_metadata", "tensor", "ack_host", "ack_port"}
    assert message["mm_hash"] == first
    assert re.fullmatch(r"[0-9a-f-]{36}", message["engine_id"])
    assert isinstance(message["agent_metadata"], bytes)
    assert message["ack_host"] == "127.0.0.1"
    tensor = message["tensor"]
    assert set(tensor) == {"base_addr", "nbytes", "device_id", "shape", "dtype_str"}
    rows, width = tensor["shape"]
    assert rows == 64
    assert (tensor["nbytes"], tensor["device_id"]) == (rows * width * 2, 0)
    assert tensor["dtype_str"] == "torch.float16"
    assert tensor["base_addr"] % 4096 == 0

    # A held item is not announced again; an ACK is heard at the next item, a sign of life at once.
    push: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    push.connect(f"tcp://127.0.0.1:{message['ack_port']}")
    ack = {"mm_hash": first, "engine_id": message["engine_id"], "consumer_engine_id": "me"}
    push.send(msgspec.msgpack.encode(ack | {"mm_hash": "", "status": "ping"}))
    encoder.wait_event("first contact from consumer engine=me")
    push.send(msgspec.msgpack.encode(ack | {"status": "ok"}))
    push.send(b"junk")
    encoder.wait_event("failed to decode ACK")
    assert ask(encoder, [part(first)], max_tokens=1).status == 200
    assert ask(encoder, [part(second)], max_tokens=1).status == 200
    assert msgspec.msgpack.decode(pull.recv())["mm_hash"] == second
    assert encoder.events(f"ACK status=ok for mm_hash={first}, evicting")
    push.close(linger=0)


def test_trusted_kwargs_are_in_the_name(lone: Lone, pull: "zmq.Socket[bytes]") -> None:
    """Where they are refused they may be allowed: then the uuid is no more the name."""
    pull.bind(f"tcp://127.0.0.1:{lone.port}")
    kwargs: dict[str, Any] = {"mm_processor_kwargs": {"max_pixels": 200_704}}
    assert ask(lone.encoder, [part(fresh())], max_tokens=1, **kwargs).status == 200
    assert re.fullmatch("[0-9a-f]{64}", msgspec.msgpack.decode(pull.recv())["mm_hash"])


def test_an_encoder_without_processor_cache_hashes_no_content(lone: Lone, pull: "zmq.Socket[bytes]") -> None:
    """It names by request what has no uuid, so a PD never asks for it; a uuid stays the name."""
    encoder, u, picture = lone.encoder, fresh(), image()
    pull.bind(f"tcp://127.0.0.1:{lone.port}")
    for name in (None, None, u):
        assert ask(encoder, [part(name, picture)], max_tokens=1).status == 200
    first, second, third = (msgspec.msgpack.decode(pull.recv())["mm_hash"] for _ in range(3))
    assert first != second
    assert all(re.search(r"-image-0$", name) for name in (first, second))
    assert third == u
    for name in (first, second, third):
        encoder.wait_event(f"registered + pushed mm_hash={name}")


def test_what_is_no_message_is_dropped(cluster: Cluster) -> None:
    push: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    push.connect(f"tcp://127.0.0.1:{cluster.pull_port}")
    push.send(b"junk")
    cluster.pd.wait_event("failed to decode received metadata")
    push.close()
    assert ask(cluster.pd, "still there?").status == 200

"""Encoders are expendable: who gets which item, who is taken out, and how they come back."""

import asyncio
import time
from collections import Counter

import pytest

from tests.fakes import Exchange, Handler, hang, shut
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, Reply, body_of, eventually, image, wait_for
from tests.proxy.upstreams import Encoder, after, completion, refuse


async def info(cluster: Cluster, index: int = 0) -> tuple[str, str]:
    """State and reason of one encoder."""
    member = (await cluster.proxy.state()).encoders[index]
    return member.state, member.reason


def shares(cluster: Cluster) -> list[int]:
    """Encodes of each encoder."""
    return [len(encoder.encodes) for encoder in cluster.encoders]


async def test_round_robin_lives_across_requests(clusters: Clusters) -> None:
    cluster = await clusters.get(encoders=4)
    for n in range(8):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    assert shares(cluster) == [2, 2, 2, 2]
    await cluster.proxy.chat(body_of(*(image(n) for n in range(8))))
    assert shares(cluster) == [4, 4, 4, 4]
    for _ in range(5):
        await cluster.proxy.chat(body_of(*(image(m) for m in range(3))))
    assert max(shares(cluster)) - min(shares(cluster)) <= 1


async def test_least_inflight_avoids_the_busy_one(clusters: Clusters) -> None:
    cluster = await clusters.get("--policy", "least_inflight", encoders=3)
    go = asyncio.Event()
    busy = cluster.encoders[0]
    busy.always(after(go, busy.chat))
    held: list[asyncio.Future[Reply]] = []
    while not busy.encodes:
        held.append(asyncio.ensure_future(cluster.proxy.chat(body_of(image(len(held))))))
        await wait_for(lambda: cluster.encodes == len(held), "the item is placed")
    for n in range(10):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    assert len(busy.encodes) == 1
    go.set()
    await asyncio.gather(*held)


async def test_least_work_counts_pixels(clusters: Clusters) -> None:
    cluster = await clusters.get("--policy", "least_work", encoders=2)
    go = asyncio.Event()
    for encoder in cluster.encoders:
        encoder.always(after(go, encoder.chat))
    sizes = {"big": (2000, 2000), "a": (500, 500), "b": (500, 500), "c": (500, 500)}
    parts = [_png(name, *size) for name, size in sizes.items()]
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(*reversed(parts))))
    await wait_for(lambda: cluster.encodes == 4, "all placed")
    assert sorted(shares(cluster)) == [1, 3], "the large one alone, though it came last"
    go.set()
    assert (await asked).status == 200


def _png(seed: str, width: int, height: int) -> dict[str, object]:
    import base64
    import struct

    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", width, height, 8, 2, 0, 0, 0)
    url = "data:image/png;base64," + base64.b64encode(head + b"\0\0\0\0" + seed.encode()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


async def test_affinity_sends_equal_content_to_one_encoder(clusters: Clusters) -> None:
    cluster = await clusters.get(
        "--policy", "affinity", "--identity", "content", "--unsafe-identity", encoders=4
    )
    for n in (1, 2, 3, 1, 2, 3, 1):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    seen = Counter(
        (encoder.name, seen.json()["messages"][0]["content"][0]["image_url"]["url"])
        for encoder in cluster.encoders
        for seen in encoder.encodes
    )
    assert len(seen) == 3, "each image at one encoder only"


async def test_failures_in_a_row_eject_and_a_trial_returns(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--eject-after", "3")
    bad = cluster.encoders[0]
    bad.always(refuse(500, "engine on fire"))
    for n in range(20):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    state, reason = await info(cluster)
    assert state == "ejected"
    assert reason
    # Ejected for 0.3 s at first: trials come one at a time, not each request.
    assert len(bad.encodes) <= 6
    bad.always(bad.chat)
    await cluster.ready(15)
    before = len(bad.encodes)
    for n in range(6):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    assert len(bad.encodes) >= before + 2


async def test_default_ejects_after_at_most_five(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--eject-seconds", "60")
    bad = cluster.encoders[0]
    bad.always(refuse(500, "no"))
    for n in range(20):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    assert 1 <= len(bad.encodes) <= 5


DEAD_LINK = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/gone.png"}}


def by_url(encoder: Encoder) -> Handler:
    """Encode, but answer 500 for an address where nobody listens, as vLLM 0.30 does."""

    async def handle(exchange: Exchange) -> None:
        if b"127.0.0.1:1/" in exchange.seen.body:
            await exchange.error(500, "Cannot connect to host 127.0.0.1:1", "InternalServerError")
        else:
            await encoder.chat(exchange)

    return handle


async def states(cluster: Cluster) -> set[str]:
    """The states of all encoders."""
    return {member.state for member in (await cluster.proxy.state()).encoders}


@pytest.mark.parametrize("links", [1, 8])
async def test_dead_links_take_no_encoder_out(clusters: Clusters, links: int) -> None:
    cluster = await clusters.fresh("--eject-seconds", "60", encoders=3)
    for encoder in cluster.encoders:
        encoder.always(by_url(encoder))
    parts = [{**DEAD_LINK, "n": n} for n in range(links)]
    for n in range(12):
        bad = await cluster.proxy.chat(body_of(*parts))
        assert "Cannot connect" in bad.error(502)["message"]
        if n % 4 == 3:  # and between them everybody else is served
            good = await asyncio.gather(*(cluster.proxy.chat(body_of(image(m))) for m in range(3)))
            assert [reply.status for reply in good] == [200] * 3

    async def back() -> bool:
        return await states(cluster) == {"ready"}

    await eventually(back, "all are ready", 10)


async def test_encoders_that_fail_everything_are_out_though_they_fail_alike(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--eject-seconds", "60")
    for encoder in cluster.encoders:
        encoder.always(refuse(500, "engine on fire"))

    async def out() -> bool:
        (await cluster.proxy.chat(body_of(image()))).error(502, 503)
        return await states(cluster) == {"ejected"}

    await eventually(out, "both are ejected", 10)
    assert (await cluster.proxy.chat(body_of(image()))).error(503)["code"] == "encoders_down"
    assert cluster.encodes <= 2 * 6, "three items each, and one of the proxy's own"


async def test_failures_of_one_request_count_when_others_can_encode_its_items(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--eject-seconds", "60")
    bad = cluster.encoders[0]
    bad.always(refuse(500, "no"))
    assert (await cluster.proxy.chat(body_of(*(image(n) for n in range(8))))).status == 200
    assert (await info(cluster))[0] == "ejected"


async def test_a_slow_host_is_no_hang_of_an_encoder(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--probe-interval", "0.2", encoders=3)
    for n in range(3):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    fetched = asyncio.Event()
    for encoder in cluster.encoders:
        encoder.always(_slow_fetch(encoder, fetched))
    before = cluster.encodes
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(DEAD_LINK)))
    # The encoder is asked to encode something else, and can: so it is given time.
    await wait_for(lambda: cluster.encodes >= before + 2, "an image of the proxy's own", 30)
    assert await states(cluster) == {"ready"}
    fetched.set()
    assert (await asked).status == 200
    holders = [e for e in cluster.encoders if any(b"127.0.0.1:1/" in seen.body for seen in e.encodes)]
    assert len(holders) == 1, "and nobody else was asked to fetch it"


def _slow_fetch(encoder: Encoder, fetched: asyncio.Event) -> Handler:
    async def handle(exchange: Exchange) -> None:
        slow = b"127.0.0.1:1/" in exchange.seen.body
        await (after(fetched, encoder.chat) if slow else encoder.chat)(exchange)

    return handle


async def test_half_open_is_one_trial(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--eject-after", "2", "--encode-timeout", "0.3")
    bad = cluster.encoders[0]
    bad.always(hang)
    at_once = 0

    async def watch(exchange: Exchange) -> None:
        nonlocal at_once
        at_once = max(at_once, bad.busy)
        await hang(exchange)

    for n in range(6):
        await cluster.proxy.chat(body_of(image(n)))
    assert (await info(cluster))[0] == "ejected"
    bad.always(watch)
    over = time.monotonic() + 1.5
    while time.monotonic() < over:
        replies = await asyncio.gather(*(cluster.proxy.chat(body_of(image(n))) for n in range(10)))
        assert {reply.status for reply in replies} == {200}
    assert at_once <= 2, "one trial, and perhaps a probe beside it"


@pytest.mark.parametrize("status", [429, 503])
async def test_busy_is_no_failure(clusters: Clusters, status: int) -> None:
    cluster = await clusters.get("--eject-after", "2")
    busy, other = cluster.encoders
    busy.always(refuse(status, "busy"))
    for n in range(10):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    assert (await info(cluster))[0] == "ready"
    assert len(other.encodes) == 10
    other.always(refuse(status, "busy"))
    reply = await cluster.proxy.chat(body_of(image(1)))
    reply.error(429, 503)
    assert "retry-after" in reply.headers


async def test_clients_that_leave_blame_nobody(clusters: Clusters) -> None:
    cluster = await clusters.get("--eject-after", "2")
    for encoder in cluster.encoders:
        encoder.always(hang)
    for n in range(8):
        asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image(n))))
        await wait_for(lambda: cluster.encodes == n + 1, "at an encoder")  # noqa: B023
        asked.cancel()
    await cluster.idle()
    assert [e.state for e in (await cluster.proxy.state()).encoders] == ["ready", "ready"]
    assert [e.errors for e in (await cluster.proxy.state()).encoders] == [0, 0]


async def test_siblings_that_were_cancelled_blame_nobody(clusters: Clusters) -> None:
    cluster = await clusters.get("--eject-after", "2")
    slow, refusing = cluster.encoders
    slow.always(hang)
    refusing.always(refuse(400, "no image"))
    for n in range(6):
        (await cluster.proxy.chat(body_of(image(n), image(n + 100)))).error(400)
    assert [e.state for e in (await cluster.proxy.state()).encoders] == ["ready", "ready"]


async def test_a_reused_connection_that_dies_is_tried_afresh(clusters: Clusters) -> None:
    cluster = await clusters.get("--eject-after", "1", encoders=1)
    (encoder,) = cluster.encoders
    for n in range(6):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
        # As vLLM does when a connection was idle too long: it closes it just as a request comes.
        encoder.then(shut)
        before = encoder.accepted
        reply = await cluster.proxy.chat(body_of(image(n)))
        assert reply.status == 200, reply.body
        assert encoder.accepted > before, "on a fresh connection"
    assert (await info(cluster))[0] == "ready"
    assert (await cluster.proxy.state()).encoders[0].errors == 0


async def test_a_fresh_connection_that_dies_is_a_failure(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--eject-after", "1", "--eject-seconds", "60", encoders=1)
    (encoder,) = cluster.encoders
    encoder.always(shut)
    (await cluster.proxy.chat(body_of(image(1)))).error(502, 503)
    assert len(encoder.encodes) <= 2


async def test_a_frozen_encoder_is_noticed_and_its_items_move(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--probe-timeout", "0.5", "--pd-probe-timeout", "0.5", encoders=3)
    frozen = cluster.encoders[1]
    frozen.always(hang)
    asked = [asyncio.ensure_future(cluster.proxy.chat(body_of(image(n)))) for n in range(3)]
    await wait_for(lambda: len(frozen.encodes) == 1, "one item at the one that will freeze")
    frozen.anything = hang
    replies = await asyncio.gather(*asked)
    assert {reply.status for reply in replies} == {200}
    assert max(reply.seconds for reply in replies) < 10, "long before the encode time-out of a minute"


async def test_a_health_that_takes_a_second_is_healthy(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--probe-timeout", "4")
    slow = cluster.encoders[0]

    async def late(exchange: Exchange) -> None:
        over = time.monotonic() + 1.0
        while time.monotonic() < over and not exchange.peer_gone:
            await asyncio.sleep(0.02)
        await exchange.answer(200, b"", ())

    slow.always(late, "/health", "GET")
    await wait_for(lambda: len(slow.requests("/health", "GET")) >= 3, "probed thrice", 10)
    assert (await info(cluster))[0] == "ready"


async def test_a_sick_health_takes_it_out_and_back(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    cluster.encoders[0].always(refuse(503, "EngineDead"), "/health", "GET")
    await eventually(lambda: _state_is_not(cluster, "ready"), "out", 5)
    for n in range(4):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    assert not cluster.encoders[0].encodes
    cluster.encoders[0].always(_fine, "/health", "GET")
    await cluster.ready(10)


async def _fine(exchange: Exchange) -> None:
    await exchange.answer(200, b"", ())


async def _state_is_not(cluster: Cluster, state: str) -> bool:
    return (await info(cluster))[0] != state


async def test_the_limit_of_one_encoder_is_kept(clusters: Clusters) -> None:
    cluster = await clusters.get("--encoder-concurrency", "2", encoders=2)
    most: Counter[str] = Counter()
    go = asyncio.Event()
    for encoder in cluster.encoders:

        async def watch(exchange: Exchange, encoder: object = encoder) -> None:
            assert encoder in cluster.encoders
            index = next(i for i, e in enumerate(cluster.encoders) if e is encoder)
            chats = sum(
                c.current is not None and c.current.seen.method == "POST"
                for c in cluster.encoders[index].connections
            )
            most[str(index)] = max(most[str(index)], chats)
            await after(go, cluster.encoders[index].chat)(exchange)

        encoder.always(watch)
    asked = [asyncio.ensure_future(cluster.proxy.chat(body_of(image(n), image(n + 50)))) for n in range(6)]
    await wait_for(lambda: cluster.encodes == 4, "both full")
    go.set()
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
    assert max(most.values()) == 2


async def test_waiting_for_an_encoder_is_bounded(clusters: Clusters) -> None:
    cluster = await clusters.get("--encoder-concurrency", "1", "--encode-wait", "0.3", encoders=1)
    go = asyncio.Event()
    (encoder,) = cluster.encoders
    encoder.always(after(go, encoder.chat))
    first = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1))))
    await wait_for(lambda: cluster.encodes == 1, "the encoder is busy")
    reply = await cluster.proxy.chat(body_of(image(2)))
    reply.error(429, 503)
    assert "retry-after" in reply.headers
    go.set()
    assert (await first).status == 200
    assert cluster.encodes == 1


async def test_an_answer_after_the_time_limit_counts_for_nobody(clusters: Clusters) -> None:
    cluster = await clusters.get("--encode-timeout", "0.3", "--eject-after", "1000")
    late, good = cluster.encoders
    go = asyncio.Event()

    async def too_late(exchange: Exchange) -> None:
        await exchange.until_gone()
        go.set()

    late.then(too_late)
    good.then(too_late)
    reply = await cluster.proxy.chat(body_of(image(1)))
    assert reply.status in {200, 504}
    assert go.is_set()


async def test_hedging_sends_a_slow_item_elsewhere_too(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--hedge", "3", encoders=2)
    for n in range(60):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    slow = cluster.encoders[0]
    slow.always(hang)
    done = [await cluster.proxy.chat(body_of(image(n))) for n in range(2)]
    assert {reply.status for reply in done} == {200}
    assert max(reply.seconds for reply in done) < 10
    await wait_for(lambda: all(seen.closed_at for seen in slow.encodes[-1:]), "the loser is aborted", 3)


async def test_a_model_that_an_encoder_does_not_serve_is_its_404(cluster: Cluster) -> None:
    for encoder in cluster.encoders:
        encoder.always(refuse(404, "The model `x` does not exist.", "NotFoundError"))
    reply = await cluster.proxy.chat(body_of(image(1), model="x"))
    assert "does not exist" in reply.error(404)["message"]


async def test_encodes_count_only_with_choices(cluster: Cluster) -> None:
    cluster.encoders[0].then(_other)
    cluster.encoders[1].then(_other)
    assert (await cluster.proxy.chat(body_of(image(1)))).status in {502, 503}
    assert not cluster.pd.calls


async def _other(exchange: Exchange) -> None:
    await exchange.json(200, {key: value for key, value in completion().items() if key != "choices"})

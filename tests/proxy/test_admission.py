"""Admission: how much may be in flight, queued and staged, and what those beyond are told."""

import asyncio
import time

import pytest

from tests.fakes import CHAT, Exchange, hang
from tests.proxy.classify import media_parts
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, Reply, body_of, eventually, image, wait_for
from tests.proxy.upstreams import DONE, after, completion, event, stream


class Watch:
    """Counts the items at the PD that have no byte yet, and the most there ever were."""

    def __init__(self, cluster: Cluster, go: asyncio.Event) -> None:
        self.now = 0
        self.most = 0
        self._go = go
        cluster.pd.always(self._answer)

    async def _answer(self, exchange: Exchange) -> None:
        body = exchange.seen.json()
        items = len({media.part["uuid"] for media in media_parts(body)})
        self.now += items
        self.most = max(self.most, self.now)

        async def reply(exchange: Exchange) -> None:
            self.now -= items
            if body.get("stream"):
                await stream()(exchange)
            else:
                await exchange.json(200, completion())

        try:
            await after(self._go, reply)(exchange)
        finally:
            if exchange.peer_gone and not exchange.complete:
                self.now -= items


async def test_items_at_the_pd_stay_within_its_pulls(clusters: Clusters) -> None:
    cluster = await clusters.get("--pd-items", "4", encoders=3)
    go = asyncio.Event()
    watch = Watch(cluster, go)
    asked = [
        asyncio.ensure_future(cluster.proxy.chat(body_of(image(n), image(n + 50), stream=n % 2 == 0)))
        for n in range(12)
    ]
    await wait_for(lambda: watch.now == 4, "the PD is full of items")
    # Those beyond wait *before* they encode: what is staged would grow old.
    assert cluster.encodes <= 8
    go.set()
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
    assert watch.most <= 4


async def test_text_passes_while_items_wait(clusters: Clusters) -> None:
    cluster = await clusters.get("--pd-items", "4", encoders=3)
    go = asyncio.Event()

    async def media_waits(exchange: Exchange) -> None:
        if media_parts(exchange.seen.json()):
            await after(go, cluster.pd.chat)(exchange)
        else:
            await cluster.pd.chat(exchange)

    cluster.pd.always(media_waits)
    asked = [
        asyncio.ensure_future(cluster.proxy.chat(body_of(*(image(n) for n in range(4))))) for _ in range(3)
    ]
    await wait_for(lambda: cluster.pd.calls, "the PD is full of items")
    for _ in range(5):
        assert (await cluster.proxy.chat(body_of("hi"))).status == 200
    go.set()
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}


async def test_more_items_than_ever_fit_are_a_400(clusters: Clusters) -> None:
    cluster = await clusters.get("--pd-items", "4", encoders=3)
    reply = await cluster.proxy.chat(body_of(*(image(n) for n in range(5))))
    assert "4" in reply.error(400)["message"]
    assert cluster.encodes == 0
    assert (await cluster.proxy.chat(body_of(*(image(n) for n in range(4))))).status == 200


async def test_the_default_is_thirty_two(cluster: Cluster) -> None:
    assert (await cluster.proxy.chat(body_of(*(image(n) for n in range(32))))).status == 200
    (await cluster.proxy.chat(body_of(*(image(n) for n in range(33))))).error(400)


async def test_a_first_byte_makes_room(clusters: Clusters) -> None:
    cluster = await clusters.get("--pd-items", "4", encoders=3)
    go = asyncio.Event()

    async def first_byte_only(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.chunk(event("a"))
        await after(go, _end)(exchange)

    cluster.pd.always(first_byte_only)
    body = body_of(*(image(n) for n in range(4)), stream=True)
    asked = [asyncio.ensure_future(cluster.proxy.chat(body)) for _ in range(4)]
    await wait_for(lambda: len(cluster.pd.calls) == 4, "all are at the PD though none has ended")
    go.set()
    assert all(reply.body.endswith(DONE) for reply in await asyncio.gather(*asked))


async def _end(exchange: Exchange) -> None:
    await exchange.chunk(DONE)
    await exchange.finish()


async def test_a_large_request_is_not_starved_by_small_ones(clusters: Clusters) -> None:
    cluster = await clusters.get("--pd-items", "4", encoders=3)
    stop = False
    done = 0

    async def small() -> None:
        nonlocal done
        while not stop:
            assert (await cluster.proxy.chat(body_of(image(done)))).status == 200
            done += 1

    crowd = [asyncio.ensure_future(small()) for _ in range(6)]
    await wait_for(lambda: done > 20, "small ones flow")
    reply = await cluster.proxy.chat(body_of(*(image(n) for n in range(4))))
    assert reply.status == 200
    assert reply.seconds < 3
    stop = True
    await asyncio.gather(*crowd)


async def test_beyond_the_queue_is_busy_at_once(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--max-inflight", "2", "--queue", "3", "--queue-timeout", "30")
    go = asyncio.Event()
    cluster.pd.always(after(go, stream()))
    body = body_of("hi", stream=True)
    asked = [asyncio.ensure_future(cluster.proxy.chat(body)) for _ in range(5)]
    await wait_for(lambda: len(cluster.pd.calls) == 2, "two in flight")

    async def queued() -> bool:
        return (await cluster.proxy.state()).queued == 3

    await eventually(queued, "three queued")
    for _ in range(3):
        reply = await cluster.proxy.chat(body)
        error = reply.error(429, 503)
        assert int(reply.headers["retry-after"]) > 0
        assert reply.seconds < 0.5
    busy = error["code"]
    assert len(cluster.pd.calls) == 2
    go.set()
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
    await cluster.pd.die()

    async def down() -> bool:
        return (await cluster.proxy.state()).pds[0].state == "down"

    await eventually(down, "down")
    assert (await cluster.proxy.chat(body_of(image(1)))).error(503)["code"] != busy


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_other_endpoints_wait_in_the_same_queue(clusters: Clusters, path: str) -> None:
    cluster = await clusters.get("--max-inflight", "1", "--queue", "1", "--queue-timeout", "20")
    go = asyncio.Event()
    cluster.pd.always(after(go, stream()))
    cluster.pd.always(after(go, cluster.pd.models), path)
    first = asyncio.ensure_future(cluster.proxy.chat(body_of("hi", stream=True)))
    await wait_for(lambda: cluster.pd.calls, "one in flight")
    second = asyncio.ensure_future(cluster.proxy.request("POST", path, b'{"model":"m","prompt":"a"}'))

    async def queued() -> bool:
        return (await cluster.proxy.state()).queued == 1

    await eventually(queued, "one queued")
    third = await cluster.proxy.request("POST", path, b'{"model":"m","prompt":"a"}')
    third.error(503)
    assert "retry-after" in third.headers
    go.set()
    assert (await first).status == (await second).status == 200


async def test_uploads_that_end_together_do_not_overrun_the_queue(clusters: Clusters) -> None:
    cluster = await clusters.get("--max-inflight", "1", "--queue", "1", "--queue-timeout", "20")
    go = asyncio.Event()
    cluster.pd.always(after(go, cluster.pd.chat))
    body = body_of("hi")
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
    begin = f"{head}content-length: {len(body)}\r\n\r\n".encode()
    uploads = [await asyncio.open_connection("127.0.0.1", cluster.proxy.port) for _ in range(6)]
    for _, writer in uploads:
        writer.write(begin + body[:10])

    async def all_begun() -> bool:
        return (await cluster.proxy.state()).inflight == 6

    await eventually(all_begun, "all have begun")
    for _, writer in uploads:
        writer.write(body[10:])
    answers = [asyncio.ensure_future(reader.read()) for reader, _ in uploads]
    await wait_for(lambda: sum(answer.done() for answer in answers) == 4, "the surplus is refused", 15)
    assert all(b" 503 " in answer.result()[:20] for answer in answers if answer.done())
    go.set()
    assert sum(b" 200 " in answer[:20] for answer in await asyncio.gather(*answers)) == 2
    for _, writer in uploads:
        writer.close()
        await writer.wait_closed()


async def test_waiting_has_an_end(clusters: Clusters) -> None:
    cluster = await clusters.get("--max-inflight", "1", "--queue", "5", "--queue-timeout", "0.4")
    go = asyncio.Event()
    cluster.pd.always(after(go, cluster.pd.chat))
    first = asyncio.ensure_future(cluster.proxy.chat(body_of("hi")))
    await wait_for(lambda: cluster.pd.calls, "one in flight")
    at = time.monotonic()
    reply = await cluster.proxy.chat(body_of("hi"))
    reply.error(429, 503)
    assert "retry-after" in reply.headers
    assert 0.3 < time.monotonic() - at < 2
    go.set()
    assert (await first).status == 200
    assert len(cluster.pd.calls) == 1


async def test_the_queue_is_first_in_first_out(clusters: Clusters) -> None:
    cluster = await clusters.get("--max-inflight", "1", "--queue", "5", "--queue-timeout", "20")
    go = asyncio.Event()
    cluster.pd.then(after(go, cluster.pd.chat))
    asked = []
    for n in range(5):
        asked.append(asyncio.ensure_future(cluster.proxy.chat(body_of(f"number {n}"))))

        async def taken(n: int = n) -> bool:
            state = await cluster.proxy.state()
            return state.inflight + state.queued > n or state.queued >= n > 0

        await eventually(taken, f"request {n} is in")
    go.set()
    await asyncio.gather(*asked)
    order = [call.json()["messages"][0]["content"][0] for call in cluster.pd.calls]
    assert order == [f"number {n}" for n in range(5)]


async def test_one_that_leaves_the_queue_leaves_no_hole(clusters: Clusters) -> None:
    cluster = await clusters.get("--max-inflight", "1", "--queue", "5", "--queue-timeout", "20")
    go = asyncio.Event()
    cluster.pd.then(after(go, cluster.pd.chat))
    first = asyncio.ensure_future(cluster.proxy.chat(body_of("first")))
    await wait_for(lambda: cluster.pd.calls, "one in flight")
    leaving = [asyncio.ensure_future(cluster.proxy.chat(body_of("leaving"))) for _ in range(3)]
    staying = asyncio.ensure_future(cluster.proxy.chat(body_of("staying")))

    async def queued(count: int) -> bool:
        return (await cluster.proxy.state()).queued == count

    await eventually(lambda: queued(4), "four queued")
    for task in leaving:
        task.cancel()
    await eventually(lambda: queued(1), "three left")
    go.set()
    assert (await first).status == 200
    assert (await staying).status == 200
    assert len(cluster.pd.calls) == 2


async def test_staged_items_of_an_encoder_are_bounded(clusters: Clusters) -> None:
    cluster = await clusters.get("--staged-items", "3", "--pd-items", "32", encoders=1)
    go = asyncio.Event()
    watch = Watch(cluster, go)
    asked = [asyncio.ensure_future(cluster.proxy.chat(body_of(image(n)))) for n in range(8)]
    await wait_for(lambda: watch.now == 3, "three staged")
    assert cluster.encodes == 3
    go.set()
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
    assert watch.most <= 3


@pytest.mark.parametrize("streamed", [False, True])
async def test_encode_slots_and_pd_slots_cannot_deadlock(clusters: Clusters, streamed: bool) -> None:
    cluster = await clusters.get(
        *("--pd-items", "3", "--encoder-concurrency", "1", "--staged-items", "2", "--max-inflight", "10"),
        *("--queue", "100", "--queue-timeout", "60"),
        encoders=2,
    )
    bodies = [body_of(*(image(f"{n}-{m}") for m in range(1 + n % 3)), stream=streamed) for n in range(30)]
    replies: list[Reply] = await asyncio.wait_for(
        asyncio.gather(*(cluster.proxy.chat(body, within=60) for body in bodies)), 60
    )
    assert {reply.status for reply in replies} == {200}


async def test_cancelled_requests_give_their_room_back(clusters: Clusters) -> None:
    cluster = await clusters.get("--pd-items", "4", encoders=3)
    cluster.pd.always(hang)
    for _ in range(4):
        asked = [
            asyncio.ensure_future(cluster.proxy.chat(body_of(*(image(n) for n in range(4)))))
            for _ in range(2)
        ]
        calls = len(cluster.pd.calls)
        await wait_for(lambda: len(cluster.pd.calls) > calls, "one at the PD")  # noqa: B023
        for task in asked:
            task.cancel()
        await cluster.idle()
    cluster.pd.always(cluster.pd.chat)
    assert (await cluster.proxy.chat(body_of(*(image(n) for n in range(4))))).status == 200


async def test_refused_requests_give_their_room_back(clusters: Clusters) -> None:
    cluster = await clusters.get("--pd-items", "4", encoders=3)

    async def refused(exchange: Exchange) -> None:
        await exchange.error(400, "no")

    for fake in (cluster.pd, cluster.encoders[0]):
        fake.always(refused)
        for _ in range(6):
            (await cluster.proxy.chat(body_of(*(image(n) for n in range(4))))).error(400)
        fake.always(fake.chat)
    assert (await cluster.proxy.chat(body_of(*(image(n) for n in range(4))))).status == 200

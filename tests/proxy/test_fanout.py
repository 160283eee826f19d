"""Encodes of one request side by side: hedges, items taken back, items that go void meanwhile, trials."""

import asyncio
import time
from collections import Counter
from typing import Any

from tests.fakes import Exchange, hang
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, body_of, eventually, image, text, wait_for
from tests.proxy.upstreams import Encoder, after, refuse


async def warm(cluster: Cluster, count: int = 60) -> None:
    """Encode so many items that every encoder's usual time is known."""
    for n in range(count):
        assert (await cluster.proxy.chat(body_of(image(f"warm {n}")))).status == 200
    for encoder in cluster.encoders:
        encoder.seen.clear()


async def drain(cluster: Cluster, index: int, more: str = "") -> None:
    """Drain one encoder."""
    answer = await cluster.proxy.admin("POST", f"/admin/encoders/encoder-{index}/drain{more}")
    assert answer.status == 200


async def test_a_hedge_that_is_taken_back_costs_the_request_nothing(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--hedge", "3", encoders=2)
    await warm(cluster)
    go = asyncio.Event()
    for encoder in cluster.encoders:
        encoder.always(after(go, encoder.chat))
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1))))
    await wait_for(lambda: cluster.encodes == 2, "the item is at both", 10)
    second = max(range(2), key=lambda n: cluster.encoders[n].encodes[0].at)
    await drain(cluster, second, "?now=true")
    await wait_for(lambda: cluster.encoders[second].encodes[0].closed_at, "taken back", 10)
    assert cluster.encoders[1 - second].encodes[0].closed_at is None, "the first goes on"
    go.set()
    assert (await asked).status == 200


async def test_the_first_may_be_taken_back_too(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--hedge", "3", encoders=2)
    await warm(cluster)
    go = asyncio.Event()
    for encoder in cluster.encoders:
        encoder.always(after(go, encoder.chat))
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1))))
    await wait_for(lambda: cluster.encodes == 2, "the item is at both", 10)
    first = min(range(2), key=lambda n: cluster.encoders[n].encodes[0].at)
    await drain(cluster, first, "?now=true")
    await wait_for(lambda: cluster.encoders[first].encodes[0].closed_at, "taken back", 10)
    go.set()
    assert (await asked).status == 200
    assert cluster.encodes == 2, "the hedge was kept"


async def test_a_hedge_waits_for_an_encoder_with_nothing_to_do(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--hedge", "3", encoders=2)
    await warm(cluster)
    go = asyncio.Event()
    for encoder in cluster.encoders:
        encoder.always(after(go, encoder.chat))
    both = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1), image(2))))
    await wait_for(lambda: cluster.encodes == 2, "both busy", 10)
    slow, quick = cluster.encoders
    slow.then(hang)
    quick.always(quick.chat)
    late = asyncio.ensure_future(cluster.proxy.chat(body_of(image(3), image(4))))
    await wait_for(lambda: cluster.encodes >= 4, "and one more each", 10)
    go.set()
    assert (await both).status == 200
    assert (await late).status == 200, "when the quick one was idle the hung item went there"
    await wait_for(lambda: slow.encodes[-1].closed_at, "the loser is aborted", 10)


async def test_what_goes_void_is_encoded_again_while_the_rest_is_encoded(clusters: Clusters) -> None:
    cluster = await clusters.fresh(encoders=4)
    slow = asyncio.Event()
    for encoder in cluster.encoders[2:]:
        encoder.always(after(slow, encoder.chat))
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(*(image(n) for n in range(4)))))
    await wait_for(lambda: cluster.encodes == 4, "all at encoders", 10)

    async def staged() -> bool:
        return [e.staged for e in (await cluster.proxy.state()).encoders] == [1, 1, 0, 0]

    await eventually(staged, "two are staged", 10)
    await drain(cluster, 0)
    # Siblings are still being encoded: nobody waits for them to begin again.
    await wait_for(lambda: cluster.encodes == 5, "encoded again at once", 10)
    slow.set()
    assert (await asked).status == 200
    (call,) = cluster.pd.calls
    uuids = {part["uuid"] for part in call.json()["messages"][0]["content"]}
    first = cluster.encoders[0].encodes[0].json()["messages"][0]["content"][0]["uuid"]
    assert first not in uuids


async def test_all_that_goes_void_is_encoded_again_together(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--pd-probe-interval", "0.1", encoders=4)
    last = asyncio.Event()
    cluster.encoders[3].always(after(last, cluster.encoders[3].chat))
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(*(image(n) for n in range(4)))))
    await wait_for(lambda: cluster.encodes == 4, "all at encoders", 10)

    async def staged() -> bool:
        return [e.staged for e in (await cluster.proxy.state()).encoders] == [1, 1, 1, 0]

    await eventually(staged, "three are staged", 10)
    again = asyncio.Event()
    for encoder in cluster.encoders:
        encoder.always(after(again, encoder.chat))
    cluster.pd.started_at += 100.0  # another life, without a gap that a probe would see
    await wait_for(lambda: cluster.encodes >= 7, "all three are at encoders at the same time", 10)
    assert not asked.done()
    again.set()
    last.set()
    assert (await asked).status == 200


async def ejected(cluster: Cluster, index: int = 0) -> bool:
    """Whether one encoder is out by its failures."""
    return (await cluster.proxy.state()).encoders[index].state == "ejected"


async def test_one_item_tries_an_ejected_encoder_when_all_are_out(clusters: Clusters) -> None:
    # Without a model to name, the proxy cannot try it by itself.
    cluster = await clusters.fresh(
        *("--eject-after", "1", "--eject-seconds", "0.1", "--encode-kinds", "audio_url"), encoders=1
    )
    (encoder,) = cluster.encoders
    part = {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:9/a"}}
    encoder.always(refuse(500, "engine on fire"))
    (await cluster.proxy.chat(body_of(part))).error(502)
    assert await ejected(cluster)
    encoder.seen.clear()
    most = 0

    def over(exchange: Exchange) -> bool:
        return time.monotonic() > exchange.seen.at + 0.2

    async def count(exchange: Exchange) -> None:
        nonlocal most
        most = max(
            most, sum(c.current is not None and c.current.seen.method == "POST" for c in encoder.connections)
        )
        # Long enough for another to arrive, were it sent.
        await wait_for(lambda: exchange.peer_gone or over(exchange), "some time")
        await exchange.error(500, "still", "InternalServerError")

    encoder.always(count)
    statuses: Counter[int] = Counter()
    while len(encoder.encodes) < 4:
        replies = await asyncio.gather(*(cluster.proxy.chat(body_of(part)) for _ in range(10)))
        statuses.update(reply.status for reply in replies)
    assert most == 1, "one trial at a time"
    assert set(statuses) <= {502, 503}
    encoder.always(encoder.chat)

    async def served() -> bool:
        return (await cluster.proxy.chat(body_of(part))).status == 200

    await eventually(served, "it is back", 15)


def trials(encoder: Encoder) -> list[Any]:
    """The proxy's own images."""
    return [seen for seen in encoder.encodes if b"ec-trial-" in seen.body]


async def test_no_trial_while_the_pd_is_down(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--eject-after", "1", "--eject-seconds", "0.2")
    bad = cluster.encoders[0]
    bad.always(refuse(500, "engine on fire"))
    while not await ejected(cluster):
        assert (await cluster.proxy.chat(body_of(image(1)))).status == 200
    await wait_for(lambda: trials(bad), "tried while the PD is there", 10)
    await cluster.pd.die()

    async def down() -> bool:
        return (await cluster.proxy.state()).pds[0].state == "down"

    await eventually(down, "the PD is down", 10)
    await wait_for(lambda: not bad.busy, "no trial under way", 10)
    before = len(trials(bad))
    bad.always(bad.chat)
    # Both encoders are probed on: many turns in which a trial would have been due.
    probes = len(bad.requests("/health", "GET"))
    await wait_for(lambda: len(bad.requests("/health", "GET")) > probes + 15, "probed on", 10)
    assert len(trials(bad)) == before
    assert await ejected(cluster)
    await cluster.pd.come_back()

    async def back() -> bool:
        return not await ejected(cluster)

    await eventually(back, "tried when the PD is back", 10)


async def test_a_trial_is_staged_until_the_pd_takes_a_step(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--eject-after", "1", "--eject-seconds", "0.2")
    bad = cluster.encoders[0]
    bad.then(refuse(500, "engine on fire"))
    while not await ejected(cluster):
        assert (await cluster.proxy.chat(body_of(image(1)))).status == 200

    async def back() -> bool:
        return (await cluster.proxy.state()).encoders[0].state == "ready"

    await eventually(back, "tried and back", 10)
    assert (await cluster.proxy.state()).encoders[0].staged == 1, (
        "its image was pushed, and nobody asks for it"
    )
    assert (await cluster.proxy.chat(body_of(text()))).status == 200
    assert (await cluster.proxy.state()).encoders[0].staged == 0, "gone with the PD's step"

"""Chaos: encoders die, hang, fail and reset while the PD restarts, and no request goes wrong for it."""

import asyncio
import json
import random
from collections import Counter

import pytest

from tests.fakes import Exchange, hang, reset
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, Reply, body_of, image, text, wait_for
from tests.proxy.upstreams import DONE, refuse

REQUESTS = 2000
AT_ONCE = 40


async def breaks_off(exchange: Exchange) -> None:
    """Reset in the middle of the answer."""
    await exchange.start(200, [("content-type", "application/json")], length=400)
    await exchange.send(b'{"id":"x","choices":[{"index":0,')
    exchange.reset()


def check(reply: Reply, streamed: bool) -> None:
    """A whole answer, an error as it should be, or a stream that ends with an error and visibly breaks."""
    if reply.status != 200:
        assert not reply.broken
        reply.error(429, 502, 503, 504)
    elif not streamed:
        assert not reply.broken
        assert reply.json()["choices"]
    elif reply.broken:
        assert b"[DONE]" not in reply.body
        assert json.loads(reply.events[-1])["error"]["message"]
    else:
        assert reply.body.endswith(DONE)


async def client(cluster: Cluster, number: int, dice: random.Random) -> str:
    """One request of a random kind; how it ended."""
    streamed = dice.random() < 0.5
    images = dice.choice((0, 0, 1, 1, 2, 3, 5))
    parts = [image(f"{number}-{dice.randrange(3)}") for _ in range(images)]
    body = body_of(*parts, text(f"number {number}"), stream=streamed)
    if dice.random() < 0.05:
        asked = asyncio.ensure_future(cluster.proxy.chat(body))
        over = asyncio.get_running_loop().time() + dice.random() * 0.05
        while asyncio.get_running_loop().time() < over:
            await asyncio.sleep(0.005)
        asked.cancel()
        return "left"
    reply = await cluster.proxy.chat(body)
    check(reply, streamed)
    return "broken" if reply.broken else str(reply.status)


async def trouble(cluster: Cluster, done: "Counter[str]") -> None:
    """One encoder is killed, one hangs, one answers 500, one resets; the PD restarts twice."""
    killed, hung, failing, resetting = cluster.encoders[:4]

    def share(part: float) -> bool:
        return sum(done.values()) >= REQUESTS * part

    await wait_for(lambda: share(0.05), "a start", 60)
    hung.always(hang)
    failing.always(refuse(500, "engine on fire", "InternalServerError"))
    await wait_for(lambda: share(0.15), "on", 60)
    await killed.stop(abort=True)
    resetting.always(breaks_off)
    for part in (0.3, 0.6):
        await wait_for(lambda: share(part), "on", 60)  # noqa: B023
        await cluster.pd.die()
        dead_at = sum(done.values())
        # Some requests must meet a dead PD.
        await wait_for(lambda: sum(done.values()) >= dead_at + 60, "requests meet a dead PD", 60)  # noqa: B023
        await cluster.pd.come_back()
    await wait_for(lambda: share(0.75), "on", 60)
    resetting.always(reset)
    await killed.start()
    for encoder in (hung, failing):
        encoder.always(encoder.chat)


@pytest.mark.timeout(110)
async def test_two_thousand_requests(clusters: Clusters) -> None:
    cluster = await clusters.fresh(
        *("--encode-timeout", "1", "--queue-timeout", "10", "--drain-delay", "0"),
        encoders=6,
    )
    dice = random.Random(7)
    done: Counter[str] = Counter()
    numbers = iter(range(REQUESTS))

    async def worker() -> None:
        for number in numbers:
            done[await client(cluster, number, dice)] += 1

    trouble_maker = asyncio.ensure_future(trouble(cluster, done))
    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    await trouble_maker
    assert sum(done.values()) == REQUESTS
    assert done["200"] > REQUESTS * 0.5, done
    assert done["503"] > 0, done
    for encoder in cluster.encoders:
        encoder.always(encoder.chat)
    await cluster.ready(20)
    before = len(cluster.pd.calls)
    replies = await asyncio.gather(*(cluster.proxy.chat(body_of(image(n), image(-n - 1))) for n in range(24)))
    assert {reply.status for reply in replies} == {200}
    assert len(cluster.pd.calls) == before + 24
    uuids = Counter(
        part["uuid"]
        for encoder in cluster.encoders
        for seen in encoder.encodes
        for part in json.loads(seen.body)["messages"][0]["content"]
    )
    assert max(uuids.values()) <= 2, (
        "an identity is asked for twice only on a fresh connection to the same encoder"
    )

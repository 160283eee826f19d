"""PD and encoders watched with the settings as shipped, in real seconds. All at once: half a minute."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes import hang
from tests.proxy.support import Cluster, body_of, eventually, image, start_cluster, wait_for
from tests.proxy.upstreams import after

OUTAGE_S = 8.0
NOTICED_S = 15.0


@pytest_asyncio.fixture(loop_scope="session")
async def shipped(tmp_path: Path) -> AsyncIterator[list[Cluster]]:
    """Clusters whose proxies have no flags but those that say who is there."""
    found = [await start_cluster(tmp_path, (), quick=False) for _ in range(4)]
    yield found
    for cluster in found:
        await cluster.end()


async def becomes(cluster: Cluster, *states: str, within: float) -> float:
    """Wait until the PD is in one of these states; the seconds that it took."""
    at = time.monotonic()

    async def there() -> bool:
        return (await cluster.proxy.state()).pds[0].state in states

    await eventually(there, f"the PD is {states}", within)
    return time.monotonic() - at


async def lives_ended(cluster: Cluster) -> float:
    """Lives of the PD that the proxy saw end."""
    return (await cluster.proxy.metrics())["eccon_proxy_pd_epochs_total"]


async def refuses(cluster: Cluster) -> None:
    """It is gone for eight seconds: the same process, as far as its start time tells."""
    ended = await lives_ended(cluster)
    await cluster.pd.die()
    noticed = await becomes(cluster, "down", within=NOTICED_S)
    assert (await cluster.proxy.get("/health")).status == 503
    (await cluster.proxy.chat(body_of(image(1)))).error(503)
    await asyncio.sleep(max(0.0, OUTAGE_S - noticed))
    await cluster.pd.start()
    await becomes(cluster, "ready", within=NOTICED_S)
    assert await lives_ended(cluster) == ended + 1
    assert (await cluster.proxy.chat(body_of(image(1)))).status == 200


async def freezes(cluster: Cluster) -> None:
    """It takes connections and says nothing for eight seconds: a process that is stopped."""
    ended = await lives_ended(cluster)
    cluster.pd.anything = hang
    await asyncio.sleep(OUTAGE_S)
    cluster.pd.anything = None
    cluster.pd.drop()
    await becomes(cluster, "ready", within=NOTICED_S)
    assert await lives_ended(cluster) == ended + 1, "it was not missed"
    assert (await cluster.proxy.chat(body_of(image(1)))).status == 200


async def is_replaced(cluster: Cluster) -> None:
    """Another process within a second: only its start time tells."""
    ended = await lives_ended(cluster)
    await cluster.pd.die()
    await cluster.pd.come_back()

    async def noticed() -> bool:
        return await lives_ended(cluster) > ended

    await eventually(noticed, "another process is noticed", NOTICED_S)
    assert await lives_ended(cluster) == ended + 1


async def stalls(cluster: Cluster) -> None:
    """Its engine stands still behind a good /health: said before the 30 s after which a real one exits."""
    cluster.pd.running = 1
    cluster.pd.always(hang)
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1), stream=True), within=60))
    await wait_for(lambda: cluster.pd.calls, "at the PD", 15)
    took = await becomes(cluster, "stalled", within=25)
    assert took > 10, "not before it was silent for the time that is set"
    assert [seen.json()["max_tokens"] for seen in cluster.pd.own] == [1]
    assert (await cluster.proxy.chat(body_of("hi"))).error(503)["code"] == "pd_stalled"
    cluster.pd.always(cluster.pd.chat)
    cluster.pd.drop()
    await asked
    await becomes(cluster, "ready", within=NOTICED_S)


async def is_full(cluster: Cluster) -> None:
    """It is busy with others: no byte for us, the canary waits in line, but its counters move."""
    cluster.pd.running, cluster.pd.waiting = 8, 40
    cluster.pd.always(hang)
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1), stream=True), within=60))
    await wait_for(lambda: cluster.pd.calls, "at the PD", 15)
    over = time.monotonic() + 22
    while time.monotonic() < over:
        cluster.pd.generated += 1
        assert (await cluster.proxy.state()).pds[0].state == "ready"
        await asyncio.sleep(0.5)
    assert cluster.pd.own, "it was asked"
    asked.cancel()


async def has_busy_encoders(cluster: Cluster) -> None:
    """One needs 8 s for its /health; of another /health never answers, but what it encodes does."""
    slow, working = cluster.encoders
    free = asyncio.Event()
    slow.always(after(free, slow.metrics), "/health", "GET")
    working.always(hang, "/health", "GET")
    begun = time.monotonic()
    while time.monotonic() < begun + 20:
        if time.monotonic() > begun + OUTAGE_S:
            free.set()
        assert [e.state for e in (await cluster.proxy.state()).encoders] == ["ready", "ready"]
        assert (await cluster.proxy.get("/health")).json()["status"] == "ok"
        for n in range(2):
            assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
        await asyncio.sleep(0.5)
    assert len(working.encodes) > 5


async def hangs_with_items(cluster: Cluster) -> None:
    """A process that is stopped: its items are elsewhere long before it is said to be down."""
    hung = cluster.encoders[0]
    for n in range(6):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    hung.anything = hang
    replies = await asyncio.gather(*(cluster.proxy.chat(body_of(image(n), image(n + 9))) for n in range(4)))
    assert {reply.status for reply in replies} == {200}
    assert max(reply.seconds for reply in replies) < 8
    assert hung.encodes, "it had some"
    before = len(hung.encodes)
    for n in range(4):
        reply = await cluster.proxy.chat(body_of(image(n)))
        assert (reply.status, reply.seconds < 3) == (200, True)
    assert len(hung.encodes) == before, "it gets no more while it is late"
    hung.anything = None
    hung.drop()

    async def back() -> bool:
        await cluster.proxy.chat(body_of(image("back")))
        return len(hung.encodes) > before

    await eventually(back, "it gets its share again", 30)


async def lists_its_models_late(cluster: Cluster) -> None:
    """It takes ten seconds to say what it serves: slow, not broken."""
    go = asyncio.Event()
    cluster.pd.always(after(go, cluster.pd.models), "/v1/models", "GET")
    asked = asyncio.ensure_future(cluster.proxy.get("/v1/models"))
    await asyncio.sleep(10)
    assert not asked.done()
    go.set()
    assert (await asked).status == 200


@pytest.mark.timeout(150)
async def test_the_pd_is_watched_well_enough_as_shipped(shipped: list[Cluster]) -> None:
    away, stalled, full, busy = shipped

    async def outages() -> None:
        for scene in (refuses, freezes, is_replaced):
            await scene(away)

    async def stalled_then_hung() -> None:
        await stalls(stalled)
        await hangs_with_items(stalled)

    await asyncio.gather(
        outages(), stalled_then_hung(), is_full(full), has_busy_encoders(busy), lists_its_models_late(busy)
    )
    for cluster in shipped:
        assert not cluster.ledger.violations
        assert "Traceback" not in cluster.proxy.log

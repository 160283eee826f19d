"""Encoders watched with the settings as shipped, in real seconds: one that dies, freezes, or only hangs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes import Exchange, hang
from tests.proxy.support import Cluster, body_of, eventually, image, start_cluster, wait_for
from tests.proxy.upstreams import Encoder

NOTICED_S = 20.0
BACK_S = 30.0


@pytest_asyncio.fixture(loop_scope="session")
async def shipped(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Five encoders behind a proxy with no flags but those that say who is there."""
    cluster = await start_cluster(tmp_path, (), encoders=5, quick=False)
    yield cluster
    await cluster.end()


async def noticed(cluster: Cluster, index: int, since: float) -> None:
    """It is out of the pool within the time that is promised, and no client has felt it since."""

    async def out() -> bool:
        return (await cluster.proxy.state()).encoders[index].state != "ready"

    await eventually(out, f"encoder-{index} is out", NOTICED_S - (time.monotonic() - since))


async def works_again(encoder: Encoder, since: float) -> None:
    """It gets an item of a client within the time that is promised."""
    before = len(clients(encoder))
    await wait_for(
        lambda: len(clients(encoder)) > before,
        f"{encoder.name} has work again",
        BACK_S - (time.monotonic() - since),
    )


def clients(encoder: Encoder) -> list[object]:
    """What it was asked to encode for clients."""
    return [seen for seen in encoder.encodes if b"ec-trial-" not in seen.body]


async def dies(cluster: Cluster, index: int) -> None:
    """Killed, and started again."""
    encoder, at = cluster.encoders[index], time.monotonic()
    await encoder.stop(abort=True)
    await noticed(cluster, index, at)
    await encoder.start()
    await works_again(encoder, time.monotonic())


async def freezes(cluster: Cluster, index: int) -> None:
    """Stopped with an item in hand: it takes connections and answers nothing; then it goes on."""
    encoder = cluster.encoders[index]
    encoder.then(hang)
    await wait_for(lambda: encoder.busy, "an item in hand", 60)
    at = time.monotonic()
    encoder.anything = hang
    await noticed(cluster, index, at)
    encoder.anything = None
    await works_again(encoder, time.monotonic())


async def hangs(cluster: Cluster, index: int) -> None:
    """Its engine hangs behind a good /health, and still does when it is tried; then it is well."""
    encoder = cluster.encoders[index]
    await wait_for(lambda: len(encoder.encodes) > 3, "it has worked before", 60)
    at = time.monotonic()
    encoder.always(hang)
    await noticed(cluster, index, at)
    await wait_for(lambda: any(b"ec-trial-" in seen.body for seen in encoder.encodes), "it is tried", 60)
    encoder.always(encoder.chat)  # what it had begun stays lost: the worst moment to recover
    await works_again(encoder, time.monotonic())


async def is_slow(cluster: Cluster, index: int, over: Callable[[], bool]) -> None:
    """Its /health takes a second: healthy all the time."""

    async def late(exchange: Exchange) -> None:
        until = time.monotonic() + 1.0
        while time.monotonic() < until and not exchange.peer_gone:
            await asyncio.sleep(0.02)
        await exchange.answer(200, b"", ())

    cluster.encoders[index].always(late, "/health", "GET")
    while not over():
        assert (await cluster.proxy.state()).encoders[index].state == "ready"
        await asyncio.sleep(0.25)


@pytest.mark.timeout(150)
async def test_encoders_are_watched_well_enough_as_shipped(shipped: Cluster) -> None:
    done = False
    slowest = 0.0

    async def traffic() -> None:
        nonlocal slowest
        number = 0
        while not done:
            number += 1
            reply = await shipped.proxy.chat(body_of(image(number)), within=60)
            assert reply.status == 200, reply.body
            slowest = max(slowest, reply.seconds)
            await asyncio.sleep(0.05)

    clients = [asyncio.ensure_future(traffic()) for _ in range(3)]
    watched = asyncio.ensure_future(is_slow(shipped, 3, lambda: done))
    try:
        await asyncio.gather(dies(shipped, 0), freezes(shipped, 1), hangs(shipped, 2))
    finally:
        done = True
    await asyncio.gather(*clients, watched)
    assert slowest < NOTICED_S + 5, "an item waits for no more than the noticing"
    assert not shipped.ledger.violations
    assert "Traceback" not in shipped.proxy.log

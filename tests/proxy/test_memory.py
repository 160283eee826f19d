"""What a request held goes with it, however it ends: a crowd of failing ones must not fill the memory."""

import asyncio

import aiohttp
import pytest

from tests.fakes import Handler, hang, reset
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, body_of, data_url, wait_for
from tests.proxy.upstreams import refuse

REQUESTS = 8
BODY = body_of(*({"type": "image_url", "image_url": {"url": data_url(n, 2_000_000)}} for n in range(2)))
ENOUGH = REQUESTS * len(BODY) // 2
FLAGS = ("--eject-after", "10000", "--poison-deaths", "10000")


def forget(cluster: Cluster) -> None:
    """The fakes keep what they saw; here that is a lot."""
    for fake in cluster.fakes:
        fake.seen.clear()


@pytest.mark.parametrize(
    ("at_encoders", "at_pd"),
    [(refuse(400, "no"), None), (refuse(500, "no"), None), (reset, None), (None, refuse(400, "no"))],
    ids=["encoders refuse", "encoders fail", "encoders break off", "the PD refuses"],
)
async def test_failed_requests_leave_nothing(
    clusters: Clusters, at_encoders: Handler | None, at_pd: Handler | None
) -> None:
    cluster = await clusters.get(*FLAGS)
    for encoder in cluster.encoders:
        encoder.always(at_encoders or encoder.chat)
    cluster.pd.always(at_pd or cluster.pd.chat)
    before = cluster.proxy.rss
    for _ in range(REQUESTS):
        assert (await cluster.proxy.chat(BODY)).status >= 400
        forget(cluster)
    await wait_for(lambda: cluster.proxy.rss < before + ENOUGH, "the bodies are gone", 10)


async def test_clients_that_left_leave_nothing(clusters: Clusters) -> None:
    cluster = await clusters.get(*FLAGS)
    for encoder in cluster.encoders:
        encoder.always(hang)
    before = cluster.proxy.rss
    for _ in range(REQUESTS):
        asked = asyncio.ensure_future(cluster.proxy.chat(BODY))
        await wait_for(lambda: cluster.encodes == 2, "both are being encoded", 20)
        asked.cancel()
        with pytest.raises((asyncio.CancelledError, aiohttp.ClientError)):
            await asked
        waiting = [seen for encoder in cluster.encoders for seen in encoder.encodes]
        await wait_for(lambda w=waiting: all(seen.closed_at for seen in w), "they are told", 20)  # type: ignore[misc]
        forget(cluster)
    await wait_for(lambda: cluster.proxy.rss < before + ENOUGH, "the bodies are gone", 10)

"""Drain of an encoder that has staged something for a request still waiting at the gate."""

import asyncio

from tests.proxy.conftest import Clusters
from tests.proxy.support import body_of, image, wait_for
from tests.proxy.test_admin import reaches
from tests.proxy.upstreams import after


async def test_requests_at_the_gate_encode_again_elsewhere(clusters: Clusters) -> None:
    cluster = await clusters.fresh(encoders=3)
    going, slow = cluster.encoders[0], cluster.encoders[1]
    release = asyncio.Event()
    slow.then(after(release, slow.chat))
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image("a"), image("b"))))
    await wait_for(lambda: cluster.encodes == 2, "both placed")
    staged_at_going = going.encodes[0].json()["messages"][0]["content"][0]["uuid"]
    await wait_for(lambda: going.encodes[0].done_at, "one is staged")
    assert (await cluster.proxy.admin("POST", "/admin/encoders/encoder-0/drain")).status == 200
    await reaches(cluster, "encoder-0", "drained")
    assert not cluster.pd.calls, "the other item is still being encoded"
    release.set()
    assert (await asked).status == 200
    assert cluster.encodes == 3, "what it had staged was encoded elsewhere"
    uuids = [part["uuid"] for part in cluster.pd.calls[0].json()["messages"][0]["content"]]
    assert staged_at_going not in uuids

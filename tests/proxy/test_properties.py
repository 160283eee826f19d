"""Random bodies: what reaches the PD is the client's but for uuids, and every medium was encoded first."""

import json
from typing import Any

from hypothesis import HealthCheck, event, given, settings

from eccon_proxy.errors import Failure
from eccon_proxy.plan import encoder_body, parse, pd_body
from tests.proxy.classify import ENCODED_KINDS, Media, canonical, media_parts, parts_of
from tests.proxy.conftest import Clusters
from tests.proxy.spelling import bodies, read, without_uuids
from tests.proxy.support import Cluster

KINDS = frozenset(ENCODED_KINDS)
WHOLE = settings(
    max_examples=100,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PURE = settings(WHOLE, max_examples=400)


def payload(media: Media) -> Any:
    """What a part gives its reader; None when there is nothing."""
    kind = media.kinds[0]
    value = media.part.get("image_url" if kind == "input_image" else kind)
    return value.get("url") if kind.endswith("_url") and isinstance(value, dict) else value


def must_be_served(body: Any) -> bool:
    """Whether nothing in a request gives a reason for a refusal."""
    found = media_parts(body)
    # A uuid without anything to identify: vLLM refuses it too.
    strays = [part for *_, part in parts_of(body) if part.get("uuid") is not None]
    return all(any(part is media.part for media in found) for part in strays) and all(
        len(media.kinds) == 1
        and media.kinds[0] in KINDS
        and payload(media)
        and media.part.get("type", media.kinds[0]) in (media.kinds[0], None)
        for media in found
    )


def check_pd(sent: str, client: str, found: list[Media], encoded: dict[str, str]) -> None:
    """Hold the PD's body against the client's. `encoded` maps uuids to the content that was encoded."""
    if not found:
        assert sent == client
        return
    assert without_uuids(read(sent)) == without_uuids(read(client))
    at_pd = media_parts(json.loads(sent))
    assert [canonical(media.part) for media in at_pd] == [canonical(media.part) for media in found]
    for media in at_pd:
        assert encoded[media.part["uuid"]] == canonical(media.part)
        assert list(media.part)[-1] == "uuid"


@PURE
@given(client=bodies())
def test_the_planner(client: str) -> None:
    found = media_parts(json.loads(client))
    try:
        plan = parse(client.encode(), kinds=KINDS)
    except Failure as failure:
        plan, status = None, failure.status
    if plan is None:
        event("refused")
        assert status == 400
        assert not must_be_served(json.loads(client)), client
        return
    event(f"{min(len(found), 3)} media")
    assert all(len(media.kinds) == 1 and media.kinds[0] in KINDS for media in found), client
    uuids = [f"uuid-{n}" for n in range(len(plan.items))]
    encoded = {}
    for item, uuid in zip(plan.items, uuids, strict=True):
        primer = json.loads(b"".join(encoder_body(plan, item, uuid.encode())))
        assert primer["model"] == "m"
        assert primer["max_tokens"] == 1
        assert primer.get("mm_processor_kwargs") == json.loads(client).get("mm_processor_kwargs")
        ((part,),) = [message["content"] for message in primer["messages"]]
        assert part["uuid"] == uuid
        encoded[uuid] = canonical(part)
    assert len(set(encoded.values())) <= len({canonical(media.part) for media in found})
    check_pd(b"".join(pd_body(plan, [uuid.encode() for uuid in uuids])).decode(), client, found, encoded)


async def exchange(cluster: Cluster, client: str) -> None:
    """Send one body through the whole proxy."""
    for fake in cluster.fakes:
        fake.seen.clear()
    reply = await cluster.proxy.chat(client.encode())
    found = media_parts(json.loads(client))
    if reply.status != 200:
        reply.error(400)
        assert not cluster.pd.calls
        assert cluster.encodes == 0
        assert not must_be_served(json.loads(client)), client
        return
    encoded = {}
    for encoder in cluster.encoders:
        for seen in encoder.encodes:
            part = seen.json()["messages"][0]["content"][0]
            encoded[part["uuid"]] = canonical(part)
    (call,) = cluster.pd.calls
    check_pd(call.body.decode(), client, found, encoded)


@WHOLE
@given(client=bodies())
async def test_the_whole_proxy(clusters: Clusters, client: str) -> None:
    cluster = await clusters.get()
    await exchange(cluster, client)

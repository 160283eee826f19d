"""Identity: the PD's copy of a part has the uuid that its encoder saw, and nothing else is changed."""

import json
from typing import Any

import pytest

from tests.proxy.classify import media_parts
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, Proxy, body_of, data_url, image, text
from tests.proxy.upstreams import MODEL

OTHER = ("--connector", "ECExampleConnector")
CONTENT = ("--identity", "content", "--unsafe-identity")
OFF = ("--identity", "off", "--unsafe-identity")


def encoded(cluster: Cluster) -> list[dict[str, Any]]:
    """The parts that the encoders saw, in order of arrival."""
    seen = sorted((s for e in cluster.encoders for s in e.encodes), key=lambda s: s.at)
    return [s.json()["messages"][0]["content"][0] for s in seen]


def at_pd(cluster: Cluster, call: int = -1) -> list[dict[str, Any]]:
    """The media parts of a request that the PD saw."""
    return [media.part for media in media_parts(cluster.pd.calls[call].json())]


async def test_each_attempt_is_new(cluster: Cluster) -> None:
    for _ in range(3):
        assert (await cluster.proxy.chat(body_of(image(1), image(2)))).status == 200
    uuids = [part["uuid"] for call in range(3) for part in at_pd(cluster, call)]
    assert len(set(uuids)) == 6
    assert sorted(uuids) == sorted(part["uuid"] for part in encoded(cluster))
    assert all(isinstance(uuid, str) and 8 <= len(uuid) <= 128 for uuid in uuids)


async def test_a_clients_uuid_never_joins_two_images(cluster: Cluster) -> None:
    reply = await cluster.proxy.chat(
        body_of(image(1, uuid="same"), image(2, uuid="same"), image(1, uuid="other"))
    )
    assert reply.status == 200
    one, two, three = at_pd(cluster)
    assert "same" not in {one["uuid"], two["uuid"]}
    assert one["uuid"] != two["uuid"]
    assert three["uuid"] != two["uuid"]
    assert {part["uuid"] for part in encoded(cluster)} == {one["uuid"], two["uuid"], three["uuid"]}


async def test_the_trace_names_the_identity(cluster: Cluster) -> None:
    await cluster.proxy.chat(body_of(image(1), image(2)), {"x-request-id": "named"})
    trace = await cluster.proxy.trace("named")
    spans = {span.item: span.uuid for span in trace.spans if span.kind == "encode"}
    assert spans == {index: part["uuid"] for index, part in enumerate(at_pd(cluster))}


PARTS = [
    '{"type":"image_url","image_url":{"url":"%s"}}',
    '{ "type" : "image_url" , "image_url" : { "url" : "%s" } }',
    '{"uuid":"mine","type":"image_url","image_url":{"url":"%s"}}',
    '{"type":"image_url","uuid":"mine","image_url":{"url":"%s"},"z":[1.0,1e5,{"uuid":"inner"}]}',
    '{"type":"image_url","image_url":{"url":"%s","uuid":"inner"},"uuid":"mine"}',
    '{"uuid":"one","type":"image_url","uuid":"two","image_url":{"url":"%s"},"uuid":null}',
    '{"\\u0075uid":"mine","type":"image_url","image_url":{"url":"%s"}}',
    '{\r\n\t"type":"image_url",\r\n"image_url":{"url":"%s"}\r\n}',
    '{"image_url":{"url":"%s"},"uuid":"a\\"}b"}',
    '{"image_url":{"url":"%s"},"x":"}]\\\\\\"{","y":-0.0}',
    '{"uuid":17,"type":"image_url","image_url":{"url":"%s"}}',
]


@pytest.mark.parametrize("written", PARTS)
async def test_every_other_token_survives(cluster: Cluster, written: str) -> None:
    part = written % data_url("p")
    tail = '{"text":"b","type":"text"}'
    body = f'{{"model":"m","x":1.00,"messages":[{{"content":["a",{part} ,{tail}]}}],"y":[]}}\n'
    reply = await cluster.proxy.chat(body.encode())
    if reply.status == 400:
        # A uuid that is no string may be refused instead.
        assert "17" in written
        return
    assert reply.status == 200
    sent = cluster.pd.calls[0].body.decode()
    before, after = body.split(part)
    assert sent.startswith(before)
    assert sent.endswith(after)
    new = sent[len(before) : len(sent) - len(after)]
    pairs: list[tuple[str, Any]] = json.loads(new, object_pairs_hook=list)
    old: list[tuple[str, Any]] = json.loads(part, object_pairs_hook=list)
    assert pairs[-1][0] == "uuid", "the part's last key"
    assert [key for key, _ in pairs].count("uuid") == 1
    assert pairs[:-1] == [(key, value) for key, value in old if key != "uuid"]
    assert new.endswith("}")
    for number in ("1.0", "1e5", "-0.0"):
        assert (number in new) == (number in part)
    (primer,) = encoded(cluster)
    assert primer == json.loads(new)


async def test_content_mode_names_equal_bytes_equally(clusters: Clusters) -> None:
    cluster = await clusters.get(*CONTENT)
    for _ in range(2):
        assert (await cluster.proxy.chat(body_of(image(1), image(2)))).status == 200
    first, second = at_pd(cluster, 0), at_pd(cluster, 1)
    assert [part["uuid"] for part in first] == [part["uuid"] for part in second]
    assert first[0]["uuid"] != first[1]["uuid"]


async def test_content_mode_keeps_apart_what_differs(clusters: Clusters) -> None:
    cluster = await clusters.get(*CONTENT)
    url = data_url(1)
    variants: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": {"url": data_url(2)}},
    ]
    assert (await cluster.proxy.chat(body_of(*variants))).status == 200
    assert len({part["uuid"] for part in at_pd(cluster)}) == 4
    assert (
        await cluster.proxy.chat(body_of(variants[0], mm_processor_kwargs={"max_pixels": 9}))
    ).status == 200
    assert at_pd(cluster)[0]["uuid"] != at_pd(cluster, 0)[0]["uuid"]


async def test_content_mode_namespaces_a_clients_uuid(clusters: Clusters) -> None:
    cluster = await clusters.get(*CONTENT)
    assert (await cluster.proxy.chat(body_of(image(1, uuid="u"), image(2, uuid="u")))).status == 200
    one, two = at_pd(cluster)
    assert one["uuid"] != two["uuid"], "two images never share an identity"
    assert one["uuid"] != "u"
    assert {part["uuid"] for part in encoded(cluster)} == {one["uuid"], two["uuid"]}


async def test_off_mode_touches_nothing(clusters: Clusters) -> None:
    cluster = await clusters.get(*OFF)
    body = body_of(image(1, uuid="mine"), image(2), text())
    assert (await cluster.proxy.chat(body)).status == 200
    assert cluster.pd.calls[0].body == body
    assert {part.get("uuid") for part in encoded(cluster)} == {"mine", None}


@pytest.mark.parametrize("identity", ["content", "off"])
async def test_unsafe_modes_must_be_asked_for(clusters: Clusters, tmp_path: Any, identity: str) -> None:
    flags = (
        "--encode-servers-urls",
        "",
        "--decode-servers-urls",
        "http://127.0.0.1:9",
        "--identity",
        identity,
    )
    proxy = await Proxy.start(tmp_path, *flags)
    assert await proxy.exited(20) != 0
    assert "--unsafe-identity" in proxy.log
    assert "Traceback" not in proxy.log
    proxy = await Proxy.start(tmp_path, *flags, *OTHER)
    await proxy.answers()
    await proxy.stop()


UUID_ONLY: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": None, "uuid": "seen"},
    {"image_url": None, "uuid": "seen"},
    {"type": "image_url", "uuid": "seen"},
    {"type": "image_url", "image_url": {"url": None}, "uuid": "seen"},
    {"type": "input_image", "image_url": None, "uuid": "seen"},
    {"type": "input_audio", "input_audio": None, "uuid": "seen"},
]


@pytest.mark.parametrize("part", UUID_ONLY)
@pytest.mark.parametrize("mode", [(), CONTENT, OFF], ids=["attempt", "content", "off"])
async def test_a_part_without_payload_is_refused(
    clusters: Clusters, mode: tuple[str, ...], part: dict[str, Any]
) -> None:
    cluster = await clusters.get(*mode)
    reply = await cluster.proxy.chat(body_of(part, image(1)))
    message = reply.error(400)["message"].lower()
    assert "uuid" in message or "without data" in message
    assert cluster.encodes == 0
    assert not cluster.pd.calls


async def test_with_another_connector_it_goes_where_that_uuid_was(clusters: Clusters) -> None:
    cluster = await clusters.get("--identity", "off", *OTHER, encoders=4)
    cluster.lenient.add("ledger")
    for n in range(4):
        assert (await cluster.proxy.chat(body_of(image(n, uuid=f"u{n}")))).status == 200
    where = {
        seen.json()["messages"][0]["content"][0]["uuid"]: encoder.name
        for encoder in cluster.encoders
        for seen in encoder.encodes
    }
    for n in (2, 0, 3, 1, 2):
        before = {encoder.name: len(encoder.encodes) for encoder in cluster.encoders}
        reply = await cluster.proxy.chat(body_of({"type": "image_url", "image_url": None, "uuid": f"u{n}"}))
        assert reply.status == 200
        grown = [e.name for e in cluster.encoders if len(e.encodes) > before[e.name]]
        assert grown == [where[f"u{n}"]]
    (await cluster.proxy.chat(body_of({"type": "image_url", "image_url": None, "uuid": "new"}))).error(400)


async def test_identical_items_share_one_identity_and_one_encode(cluster: Cluster) -> None:
    same = image(1)
    written = json.dumps(same)
    spaced = written.replace('{"type"', '{ "type"')
    body = f'{{"model":"{MODEL}","messages":[{{"content":[{written},{spaced},{written}]}}]}}'
    assert (await cluster.proxy.chat(body.encode())).status == 200
    uuids = [part["uuid"] for part in at_pd(cluster)]
    assert uuids[0] == uuids[2]
    assert 1 <= cluster.encodes <= 2
    assert set(uuids) == {part["uuid"] for part in encoded(cluster)}


async def test_a_part_with_neither_payload_nor_uuid_never_goes_unprimed(cluster: Cluster) -> None:
    reply = await cluster.proxy.chat(body_of({"type": "image_url", "image_url": None}))
    assert reply.status in {200, 400}
    assert len(cluster.pd.calls) == (reply.status == 200)

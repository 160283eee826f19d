"""Shapes of requests: what clients really send, and what the encoders and the PD must get of it."""

import asyncio
import base64
import copy
import gzip
import hashlib
import json
import random
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.fakes import CHAT
from tests.proxy.classify import canonical, media_parts
from tests.proxy.conftest import Clusters
from tests.proxy.support import JSON_TYPE, Cluster, body_of, image, text, wait_for
from tests.proxy.upstreams import MODEL, refuse

FORBIDDEN = {"stream_options", "n", "tools", "tool_choice", "response_format", "logprobs", "min_tokens"}


def without_uuids(body: Any) -> Any:
    """A request without the identities of its parts."""
    stripped = copy.deepcopy(body)
    for media in media_parts(stripped):
        media.part.pop("uuid", None)
    return stripped


def check_primers(cluster: Cluster, wanted: list[dict[str, Any]]) -> None:
    """Every wanted part was encoded once, alone in a user message, with the uuid that the PD got."""
    primers = [seen.json() for encoder in cluster.encoders for seen in encoder.encodes]
    parts = []
    for primer in primers:
        assert primer["max_tokens"] == 1
        assert not primer.get("stream")
        assert not FORBIDDEN & set(primer), primer.keys()
        (message,) = primer["messages"]
        assert message["role"] == "user"
        (part,) = message["content"]
        parts.append(part)
    assert sorted(map(canonical, parts)) == sorted(map(canonical, wanted))
    (call,) = cluster.pd.calls
    at_pd = {media.part["uuid"] for media in media_parts(call.json())}
    assert at_pd == {part["uuid"] for part in parts}


async def test_assistant_turns_without_content_pass_and_the_image_is_encoded(cluster: Cluster) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    part = image(1)
    body = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "assistant", "content": []},
            {"role": "tool", "tool_call_id": "x", "content": "1"},
            {"role": "user", "content": [part, text("?")]},
        ],
    }
    reply = await cluster.proxy.chat(json.dumps(body).encode())
    assert reply.status == 200
    check_primers(cluster, [part])
    assert without_uuids(cluster.pd.calls[0].json()) == body


async def test_the_status_of_the_pd_is_relayed_for_odd_conversations(cluster: Cluster) -> None:
    cluster.pd.then(refuse(400, "no empty content, please"))
    reply = await cluster.proxy.chat(b'{"model":"m","messages":[{"role":"assistant","content":[]}]}')
    assert reply.error(400)["message"] == "no empty content, please"


async def test_a_bare_string_is_a_part(cluster: Cluster) -> None:
    part = image(1)
    reply = await cluster.proxy.chat(body_of("How many colleagues?", part))
    assert reply.status == 200
    check_primers(cluster, [part])
    assert cluster.pd.calls[0].json()["messages"][0]["content"][0] == "How many colleagues?"


NOT_OBJECTS = [
    b"[1,2]",
    b'"x"',
    b"null",
    b"",
    b"{bad",
    b"\x00",
    b"{}{}",
    b'{"a":1}x',
    b"   ",
    b"{'a':1}",
    b"1",
]
ODD_OBJECTS = [
    b'{"messages":"hello"}',
    b'{"messages":null}',
    b'{"model":"m"}',
    b"{}",
    b'{"model":"m","messages":[{"role":"user","content":[1]}]}',
    b'{"model":"m","messages":[{"role":"user","content":[null]}]}',
    b'{"model":"m","messages":[{"role":"user","content":[[]]}]}',
    b'{"model":"m","messages":[{"role":"user","content":[{"type":["image_url"]}]}]}',
    b'{"model":"m","messages":[{"role":"user","content":[{"type":{}}]}]}',
    b'{"model":"m","messages":[{"role":"user","content":{"type":"image_url"}}]}',
    b'{"model":"m","messages":[null,1,"x",[],{}]}',
    b'{"model":"m","messages":{"role":"user"}}',
    b'{"model":7,"messages":[]}',
    b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":"yes"}',
    b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":1}',
    b'{"model":"m","messages":[{"role":"user","content":7}]}',
]


@pytest.mark.parametrize("body", NOT_OBJECTS)
async def test_what_is_no_json_object_is_refused(cluster: Cluster, body: bytes) -> None:
    reply = await cluster.proxy.chat(body)
    reply.error(400)
    assert cluster.encodes == 0
    assert not cluster.pd.calls


@pytest.mark.parametrize("body", ODD_OBJECTS)
async def test_odd_objects_are_refused_here_or_by_the_pd(cluster: Cluster, body: bytes) -> None:
    cluster.pd.always(refuse(400, "by the PD"))
    reply = await cluster.proxy.chat(body)
    reply.error(400)
    assert cluster.encodes == 0
    assert all(seen.body == body for seen in cluster.pd.calls)


URL = image(1)["image_url"]["url"]
KINDS: dict[str, Any] = {
    "image_url": {"url": URL},
    "input_image": URL,
    "image_embeds": "AAAA",
    "audio_url": {"url": "http://127.0.0.1:9/a.wav"},
    "input_audio": {"data": "AAAA", "format": "wav"},
    "audio_embeds": "AAAA",
    "video_url": {"url": "http://127.0.0.1:9/v.mp4"},
    "video_embeds": "AAAA",
    "prompt_embeds": "AAAA",
}
BY_DEFAULT = {"image_url", "input_image", "audio_url", "input_audio"}
NEVER_BY_DEFAULT = {"video_url", "video_embeds", "prompt_embeds"}


def part_of(kind: str) -> dict[str, Any]:
    """A part of a kind as clients write it."""
    if kind == "input_image":
        return {"type": kind, "image_url": KINDS[kind]}
    return {"type": kind, kind: KINDS[kind]}


SPELLINGS = ["plain", "no type", "null type", "uuid", "uuid and no type", "escaped", "doubled", "spaced"]


def spell(kind: str, spelling: str) -> bytes:
    """The same part, written in another way that vLLM reads alike."""
    part = part_of(kind)
    if spelling == "no type":
        del part["type"]
    elif spelling == "null type":
        part["type"] = None
    elif spelling == "uuid":
        part["uuid"] = "mine"
    elif spelling == "uuid and no type":
        del part["type"]
        part["uuid"] = "mine"
    written = json.dumps(part)
    if spelling == "escaped":
        for name in ("type", *KINDS):
            escaped = f"\\u{ord(name[0]):04x}" + name[1:]
            written = written.replace(f'"{name}"', f'"{escaped}"')
    elif spelling == "doubled":
        written = '{"type":"text",' + written[1:]
    elif spelling == "spaced":
        written = written.replace(":", " \n\t: ", 2).replace("{", "{ \r\n", 1)
    return f'{{"model":"m","messages":[{{"role":"user","content":[{written},"?"]}}]}}'.encode()


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", KINDS)
async def test_media_of_every_kind_and_spelling_is_encoded_or_refused(
    cluster: Cluster, kind: str, spelling: str
) -> None:
    reply = await cluster.proxy.chat(spell(kind, spelling))
    if reply.status == 200:
        assert kind not in NEVER_BY_DEFAULT
        assert cluster.encodes == 1
        assert len(cluster.pd.calls) == 1
    else:
        assert kind not in BY_DEFAULT
        assert kind in reply.error(400)["message"]
        assert cluster.encodes == 0
        assert not cluster.pd.calls


@pytest.mark.parametrize("kind", ["video_url", "image_embeds", "audio_embeds", "video_embeds"])
async def test_kinds_are_encoded_when_enabled(clusters: Clusters, kind: str) -> None:
    kinds = "image_url,input_image,image_embeds,audio_url,input_audio,audio_embeds,video_url,video_embeds"
    cluster = await clusters.get("--encode-kinds", kinds)
    reply = await cluster.proxy.chat(spell(kind, "plain"))
    assert reply.status == 200
    check_primers(cluster, [part_of(kind)])


async def test_prompt_embeds_hold_their_payload_under_data(clusters: Clusters) -> None:
    cluster = await clusters.get("--encode-kinds", "prompt_embeds")
    for encoder in cluster.encoders:
        encoder.always(refuse(400, "prompt_embeds are not enabled"))
    part = {"type": "prompt_embeds", "data": "AAAA"}
    assert "not enabled" in (await cluster.proxy.chat(body_of(part))).error(400)["message"]
    assert cluster.encodes == 1


async def test_a_kind_that_the_encoder_cannot_do_is_its_4xx(cluster: Cluster) -> None:
    for encoder in cluster.encoders:
        encoder.always(refuse(400, "At most 0 audio(s) may be provided"))
    reply = await cluster.proxy.chat(body_of(part_of("audio_url")))
    assert "At most 0 audio(s)" in reply.error(400)["message"]
    assert cluster.encodes == 1
    assert not cluster.pd.calls


async def test_invented_types_are_for_the_pd_to_refuse(cluster: Cluster) -> None:
    cluster.pd.always(refuse(400, "Unsupported chat content part type"))
    body = body_of({"type": "hologram_url", "hologram_url": {"url": "x"}})
    reply = await cluster.proxy.chat(body)
    assert reply.error(400)["message"] == "Unsupported chat content part type"
    assert cluster.pd.calls[0].body == body
    assert cluster.encodes == 0


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "x", "image_url": {"url": URL}, "uuid": "u"},
        {"type": "hologram", "image_url": {"url": URL}, "uuid": "u"},
        {"type": "hologram", "video_url": {"url": URL}, "uuid": "u"},
        {"type": "text", "text": "x", "image_url": {"url": URL}},
    ],
)
async def test_a_media_key_under_another_type_is_never_unprimed(
    cluster: Cluster, part: dict[str, Any]
) -> None:
    reply = await cluster.proxy.chat(body_of(part))
    assert reply.status in {200, 400}
    if reply.status == 400:
        assert not cluster.pd.calls
    else:
        # The ledger holds the PD's copy against what was encoded.
        assert cluster.encodes == 1


@pytest.mark.parametrize("uuid", [{}, {"uuid": "u"}])
@pytest.mark.parametrize(
    "keys",
    [("image_url", "video_url"), ("image_url", "image_embeds"), ("audio_url", "input_audio")],
)
async def test_a_part_with_several_media_keys_is_refused(
    cluster: Cluster, keys: tuple[str, ...], uuid: dict[str, str]
) -> None:
    reply = await cluster.proxy.chat(body_of({"type": keys[0], **{key: KINDS[key] for key in keys}, **uuid}))
    reply.error(400)
    assert cluster.encodes == 0
    assert not cluster.pd.calls


async def test_images_of_every_role_are_encoded(cluster: Cluster) -> None:
    parts = [image(n) for n in range(5)]
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": [text("see"), parts[0]]},
            {"role": "user", "content": [parts[1], text("and")]},
            {"role": "assistant", "content": [parts[2]], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "x", "content": [parts[3]]},
            {"role": "developer", "content": [parts[4]]},
            {"role": "user", "content": "so?"},
        ],
    }
    reply = await cluster.proxy.chat(json.dumps(body).encode())
    assert reply.status == 200
    check_primers(cluster, parts)
    assert without_uuids(cluster.pd.calls[0].json()) == body


@pytest.mark.parametrize(
    "part",
    [
        {
            "type": "image_url",
            "image_url": {"url": URL, "detail": None},
            "cache_control": {"type": "ephemeral"},
            "uuid": "u9",
        },
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}, "x": [1.0, None, {"uuid": "no"}]},
        {"type": "image_url", "image_url": URL},
        {"image_url": URL, "min_pixels": 3},
    ],
)
async def test_the_part_reaches_the_encoder_with_all_its_keys(cluster: Cluster, part: dict[str, Any]) -> None:
    cluster.pd.always(refuse(422, "as you like"))
    reply = await cluster.proxy.chat(body_of(part, text()))
    assert reply.error(422)["message"] == "as you like"
    check_primers(cluster, [part])
    assert without_uuids(cluster.pd.calls[0].json()) == without_uuids(json.loads(body_of(part, text())))


async def test_what_changes_the_hash_is_in_every_primer(cluster: Cluster) -> None:
    keys = {
        "mm_processor_kwargs": {"max_pixels": 200704},
        "media_io_kwargs": {"video": {"num_frames": 8}},
        "priority": 3,
    }
    more = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "n": 2,
        "logprobs": True,
        "response_format": {"type": "json_object"},
        "min_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 77,
    }
    reply = await cluster.proxy.chat(body_of(image(1), image(2), **keys, **more))
    assert reply.status == 200
    check_primers(cluster, [image(1), image(2)])
    for encoder in cluster.encoders:
        for seen in encoder.encodes:
            assert {key: seen.json().get(key) for key in keys} == keys
            assert seen.json()["model"] == MODEL


async def test_absent_keys_stay_absent_in_primers(cluster: Cluster) -> None:
    assert (await cluster.proxy.chat(body_of(image(1)))).status == 200
    (primer,) = [seen.json() for encoder in cluster.encoders for seen in encoder.encodes]
    assert not {"mm_processor_kwargs", "media_io_kwargs", "priority"} & primer.keys()


async def test_the_model_of_the_client_is_the_encoders_too(cluster: Cluster) -> None:
    assert (await cluster.proxy.chat(body_of(image(1), model="./a b\u00e9"))).status == 200
    (primer,) = [seen.json() for encoder in cluster.encoders for seen in encoder.encodes]
    assert primer["model"] == "./a b\u00e9"


async def test_identical_items_are_encoded_once_a_request(cluster: Cluster) -> None:
    part = image("same")
    for round_ in (1, 2):
        reply = await cluster.proxy.chat(body_of(part, text("a"), part, part, text("b")))
        assert reply.status == 200
        assert cluster.encodes == round_
        content = cluster.pd.calls[-1].json()["messages"][0]["content"]
        assert [part["type"] for part in content] == ["image_url", "text", "image_url", "image_url", "text"]
        assert len({part["uuid"] for part in content if part["type"] == "image_url"}) == 1
    uuids = {call.json()["messages"][0]["content"][0]["uuid"] for call in cluster.pd.calls}
    assert len(uuids) == 2, "the second request has an identity of its own"


async def test_another_detail_is_another_item(cluster: Cluster) -> None:
    low = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    high = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    assert (await cluster.proxy.chat(body_of(low, high, low))).status == 200
    assert cluster.encodes == 2
    first, second, third = cluster.pd.calls[0].json()["messages"][0]["content"]
    assert first["uuid"] == third["uuid"] != second["uuid"]


async def test_large_bodies_arrive_whole(cluster: Cluster) -> None:
    png = random.Random(11).randbytes(9_000_000)
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    body = body_of(part)
    assert len(body) > 12_000_000
    reply = await cluster.proxy.chat(body)
    assert reply.status == 200
    check_primers(cluster, [part])
    assert without_uuids(cluster.pd.calls[0].json()) == json.loads(body)


async def test_a_body_without_media_of_many_megabytes_is_untouched(cluster: Cluster) -> None:
    body = body_of(text("x" * 65_000_000))
    assert (await cluster.proxy.chat(body)).status == 200
    assert cluster.pd.calls[0].digest == hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("over", [1, 3_000_000])
async def test_a_body_over_the_limit_is_a_readable_413(clusters: Clusters, over: int) -> None:
    cluster = await clusters.get("--max-body", "1000000")
    body = b"x" * (1_000_000 + over)
    async with httpx.AsyncClient() as client:
        answer = await client.post(cluster.proxy.url + CHAT, content=body, headers=JSON_TYPE)
    assert answer.status_code == 413
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    with pytest.raises(openai.APIStatusError) as caught:
        async with openai.AsyncOpenAI(base_url=cluster.proxy.url + "/v1", api_key="x", max_retries=0) as ai:
            await ai.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "y" * (1_000_000 + over)}]
            )
    assert caught.value.status_code == 413
    assert not cluster.pd.calls


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", CHAT, {"content-type": "text/plain"}, 415),
        ("POST", CHAT, {"content-encoding": "gzip"}, 415),
        ("POST", CHAT, {"authorization": "Bearer wrong"}, 401),
        ("POST", CHAT, {}, 413),
        ("PUT", CHAT, {}, 405),
        ("POST", "/v1/nothing", {}, 404),
    ],
)
async def test_a_refusal_is_read_by_who_still_sends(
    clusters: Clusters, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    cluster = await clusters.get("--max-body", "1000000", "--api-key", "good")
    everything = {**JSON_TYPE, "authorization": "Bearer good", "connection": "close", **headers}
    body = b"x" * 5_000_000
    for _ in range(3):
        # This client closes its connection after each answer, and asks the proxy to.
        (await cluster.proxy.request(method, path, body, everything)).error(status)
    head = f"{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in everything.items())
    at = time.monotonic()
    answer = await cluster.proxy.raw(head.encode() + b"\r\n" + body[:100_000], 20)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert time.monotonic() - at < 15, "who does not go on sending is not waited for"


@pytest.mark.parametrize("chunked", [False, True])
async def test_the_limit_as_shipped(cluster: Cluster, chunked: bool) -> None:
    limit = (await cluster.proxy.admin("GET", "/admin/settings")).json()["max_body"]
    assert limit >= 64 * 2**20
    piece = b" " * 2**20
    before = cluster.proxy.rss

    async def body() -> AsyncIterator[bytes]:
        for _ in range(limit // len(piece)):
            yield piece
        yield b" "

    headers = JSON_TYPE if chunked else {**JSON_TYPE, "content-length": str(limit + 1)}
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(cluster.proxy.url + CHAT, content=body(), headers=headers)
    assert answer.status_code == 413
    assert str(limit) in answer.json()["error"]["message"]
    assert not cluster.pd.calls
    await wait_for(lambda: cluster.proxy.rss < before + 40_000_000, "memory given back", 20)


async def test_the_limit_holds_for_chunked_bodies_and_at_the_edge(clusters: Clusters) -> None:
    cluster = await clusters.get("--max-body", "1000000")
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n".encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (65536, b" " * 65536) for _ in range(20)) + b"0\r\n\r\n"
    answer = await cluster.proxy.raw(
        head + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks, 3
    )
    assert answer.startswith(b"HTTP/1.1 413 ")
    fits = body_of(text(""))
    body = body_of(text("z" * (1_000_000 - len(fits))))
    assert len(body) == 1_000_000
    assert (await cluster.proxy.chat(body)).status == 200


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
async def test_numbers_that_json_lacks_are_a_400(cluster: Cluster, literal: str) -> None:
    cluster.pd.always(refuse(400, "Out of range float values are not JSON compliant"))
    body = f'{{"temperature":{literal},"messages":[{{"role":"user","content":"hi"}}]}}'.encode()
    (await cluster.proxy.chat(body)).error(400)
    assert all(seen.body == body for seen in cluster.pd.calls)


TOKENS = (
    b'{"model":"m","seed":123456789012345678901234567890,"seed":5,"temperature":1.0,'
    b'"x_new_field":{"a":[1e400,-0.0,1E5,"\\u0041\\/\\ud83d\\ude42"]}, "messages" :[%b] , "stream":true,'
    b'"stream": false}\r\n'
)


async def test_text_reaches_the_pd_byte_for_byte(cluster: Cluster) -> None:
    body = TOKENS % b'{"role":"user","content":"h\\u0069"}'
    reply = await cluster.proxy.chat(body)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("application/json"), "the last stream key wins"
    assert cluster.pd.calls[0].body == body
    assert cluster.pd.calls[0].header("content-length") == str(len(body))


async def test_with_media_only_uuids_are_added(cluster: Cluster) -> None:
    part = b'{ "type" : "image_url" ,"image_url":{"url":"%b"},"n":1.50 , "n":2}' % URL.encode()
    body = TOKENS % (b'{"role":"user","content":["h\\u0069",%b]}' % part)
    assert (await cluster.proxy.chat(body)).status == 200
    (call,) = cluster.pd.calls
    uuid = media_parts(call.json())[0].part["uuid"]
    tail = b'"uuid":"%b"}' % uuid.encode()
    compact = call.body.replace(b'"uuid": "', b'"uuid":"')
    before, after = compact.split(tail)
    assert before.rstrip(b" ,") + b"}" + after == body
    assert before.rstrip(b" ").endswith(b",")


async def test_the_last_of_doubled_messages_counts(cluster: Cluster) -> None:
    with_image = json.dumps([{"role": "user", "content": [image(1)]}])
    without = '[{"role":"user","content":"hi"}]'
    body = f'{{"model":"m","messages":{with_image},"messages":{without}}}'.encode()
    assert (await cluster.proxy.chat(body)).status in {200, 400}
    assert all(media_parts(call.json()) == [] for call in cluster.pd.calls)
    body = f'{{"model":"m","messages":{without},"messages":{with_image}}}'.encode()
    reply = await cluster.proxy.chat(body)
    assert reply.status in {200, 400}
    if reply.status == 200:
        assert cluster.encodes == 1


@pytest.mark.parametrize("place", ["message", "content", "part", "url"])
async def test_the_last_of_doubled_keys_counts_at_every_depth(cluster: Cluster, place: str) -> None:
    part = json.dumps(image(1))
    body = {
        "message": f'{{"role":"user","content":"x","content":[{part}]}}',
        "content": f'{{"role":"user","content":[{part}],"content":[{json.dumps(image(2))}]}}',
        "part": '{"role":"user","content":[{"image_url":1,"type":"text",' + part[1:] + "]}",
        "url": '{"role":"user","content":[{"type":"image_url","image_url":null,' + part[1:] + "]}",
    }[place]
    reply = await cluster.proxy.chat(f'{{"model":"m","messages":[{body}]}}'.encode())
    assert reply.status == 200, reply.body
    assert cluster.encodes == 1


async def test_a_byte_order_mark_is_accepted(cluster: Cluster) -> None:
    body = b"\xef\xbb\xbf" + body_of("hi")
    assert (await cluster.proxy.chat(body)).status == 200
    assert cluster.pd.calls[0].body == body


async def test_a_byte_order_mark_before_media(cluster: Cluster) -> None:
    body = b"\xef\xbb\xbf" + body_of(image(1))
    assert (await cluster.proxy.chat(body)).status == 200
    assert cluster.pd.calls[0].body.startswith(b"\xef\xbb\xbf{")
    assert cluster.encodes == 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"\xff\xfe"}]}',
        b'{"model":"m\xc0\x80","messages":[{"role":"user","content":"x"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        '{"model":"m","messages":[]}'.encode("utf-16-le"),
        '{"model":"m","messages":[]}'.encode("utf-16"),
        '{"model":"m","messages":[]}'.encode("utf-32"),
    ],
)
async def test_other_encodings_are_a_400(cluster: Cluster, body: bytes) -> None:
    cluster.pd.always(refuse(400, "by the PD"))
    (await cluster.proxy.chat(body)).error(400)
    assert cluster.encodes == 0


async def test_a_lone_surrogate_does_not_break_anything(cluster: Cluster) -> None:
    body = (
        b'{"model":"m","messages":[{"role":"user","content":["\\ud83d",%b]}]}'
        % json.dumps(image("s")).encode()
    )
    reply = await cluster.proxy.chat(body)
    assert reply.status in {200, 400}
    if reply.status == 400:
        reply.error(400)
    else:
        assert b'"\\ud83d"' in cluster.pd.calls[0].body


@pytest.mark.parametrize("coding", ["gzip", "zstd", "br", "deflate", "gzip, gzip"])
async def test_coded_bodies_are_a_415(cluster: Cluster, coding: str) -> None:
    body = gzip.compress(body_of("hi"))
    reply = await cluster.proxy.chat(body, {"content-encoding": coding})
    reply.error(415)
    assert reply.headers["accept-encoding"] == "identity"
    assert not cluster.pd.calls


async def test_a_compression_bomb_is_not_inflated(cluster: Cluster) -> None:
    # 4 GiB of zeros: what 16 MiB become after a full flush does not depend on what was before.
    squeeze = zlib.compressobj(9, wbits=31)
    head = squeeze.compress(bytes(2**24)) + squeeze.flush(zlib.Z_FULL_FLUSH)
    again = squeeze.compress(bytes(2**24)) + squeeze.flush(zlib.Z_FULL_FLUSH)
    bomb = head + again * 255 + squeeze.flush()
    assert len(bomb) > 1_000_000
    before = cluster.proxy.rss
    (await cluster.proxy.chat(bomb, {"content-encoding": "gzip"})).error(415, 413, 400)
    assert cluster.proxy.rss < before + 40_000_000


async def test_identity_is_no_coding(cluster: Cluster) -> None:
    assert (await cluster.proxy.chat(body_of("hi"), {"content-encoding": "identity"})).status in {200, 415}


async def test_chunked_bodies_arrive_whole(cluster: Cluster) -> None:
    body = '{"model":"m","messages":[{"role":"user","content":"한국"}]}'.encode()
    cut = body.index("한".encode()) + 1
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
        "transfer-encoding: chunked\r\n\r\n"
    )
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:cut], body[cut:]))
    answer = await cluster.proxy.raw(head.encode() + chunks + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    (call,) = cluster.pd.calls
    assert call.body == body
    assert bool(call.header("content-length")) != bool(call.header("transfer-encoding"))


@pytest.mark.parametrize(
    "kind",
    [
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8",
        "Application/JSON",
        "application/json ; a=b",
    ],
)
async def test_content_types_that_are_json(cluster: Cluster, kind: str) -> None:
    assert (await cluster.proxy.chat(body_of("hi"), {"content-type": kind})).status == 200
    assert cluster.pd.calls[0].body == body_of("hi")


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
async def test_other_content_types_are_refused(cluster: Cluster, kind: str) -> None:
    body = body_of("hi")
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    if kind:
        head += f"content-type: {kind}\r\n"
    answer = await cluster.proxy.raw(head.encode() + b"\r\n" + body)
    assert answer.split()[1] in {b"400", b"415"}
    assert b"application/json" in answer.split(b"\r\n\r\n")[0]
    assert set(json.loads(answer.split(b"\r\n\r\n", 1)[1])) == {"error"}
    assert not cluster.pd.calls


async def test_expect_continue(cluster: Cluster) -> None:
    body = body_of("hi")
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.proxy.port)
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nexpect: 100-continue\r\n\r\n".encode()
    )
    interim = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert interim.startswith(b"HTTP/1.1 100 ")
    writer.write(body)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 200 ")
    (call,) = cluster.pd.calls
    assert call.body == body
    assert call.header("expect") is None


DEEP = 100_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":' + b"[" * DEEP + b"]" * DEEP + b"}]}",
        b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        b'{"messages":[],"x":' + b'[{"a":' * DEEP + b"1" + b"}]" * DEEP + b"}",
        b"[" * DEEP,
        b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":'
        + b"[" * DEEP
        + b"]" * DEEP
        + b"}]}]}",
    ],
)
async def test_deep_nesting_is_a_400_at_once(cluster: Cluster, body: bytes) -> None:
    at = time.monotonic()
    (await cluster.proxy.chat(body)).error(400)
    assert time.monotonic() - at < 2.0
    assert cluster.encodes == 0
    assert not cluster.pd.calls
    assert (await cluster.proxy.chat(body_of("hi"))).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stock_client_is_served(cluster: Cluster, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=cluster.proxy.url + "/v1", api_key="x", max_retries=0) as ai:
        messages: Any = [{"role": "user", "content": [image(1), image(2), text()]}]
        if stream:
            chunks = [
                c async for c in await ai.chat.completions.create(model=MODEL, messages=messages, stream=True)
            ]
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            said = (await ai.chat.completions.create(model=MODEL, messages=messages)).choices[
                0
            ].message.content or ""
    assert said == "ok"
    check_primers(cluster, [image(1), image(2)])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize"])
async def test_media_elsewhere_than_in_chat_is_refused(cluster: Cluster, path: str) -> None:
    responses_input = [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]
    for body in (
        json.loads(body_of(image(1))),
        {"model": MODEL, "input": responses_input},
        {"model": MODEL, "prompt": "x", "prompt_embeds": "AAAA"},
    ):
        (await cluster.proxy.request("POST", path, json.dumps(body).encode())).error(400)
    assert all(seen.method == "GET" for seen in cluster.pd.seen)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"]
)
async def test_other_endpoints_pass_to_the_pd(cluster: Cluster, path: str) -> None:
    cluster.pd.always(refuse(418, "teapot"), path)
    body = b'{ "model":"m", "prompt": "x", "n": 1.0}'
    assert (await cluster.proxy.request("POST", path, body)).error(418)["message"] == "teapot"
    (seen,) = cluster.pd.requests(path)
    assert seen.body == body


async def test_there_is_no_catch_all(cluster: Cluster) -> None:
    for method, path in (
        ("POST", "/v1/anything"),
        ("GET", "/"),
        ("POST", "/start_profile"),
        ("GET", "/admin/state"),
    ):
        (await cluster.proxy.request(method, path, b"{}" if method == "POST" else None)).error(404, 405)

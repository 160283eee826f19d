"""What might smuggle an item past the encoders: one that nobody pushed stops the PD, then ends it."""

import asyncio
import json
from typing import Any

import pytest

from tests.fakes import CHAT
from tests.proxy.support import JSON_TYPE, Cluster, body_of, data_url, image
from tests.proxy.upstreams import MODEL, refuse

URL = data_url("kill")
UUIDS: list[Any] = ["u", "", 0, 1, False, True, [], {}, ["u"], {"a": 1}, 1.5]


@pytest.mark.parametrize("uuid", UUIDS, ids=json.dumps)
@pytest.mark.parametrize("kind", ["text", "image_url", "hologram", None, 7])
async def test_any_uuid_makes_the_key_count(cluster: Cluster, kind: object, uuid: object) -> None:
    reply = await cluster.proxy.chat(
        body_of({"type": kind, "text": "x", "image_url": {"url": URL}, "uuid": uuid})
    )
    assert reply.status in {200, 400}
    if reply.status == 200:
        assert cluster.encodes == 1, "the PD was asked, so an encoder was first"
    else:
        assert not cluster.pd.calls


LOOKALIKES: list[dict[str, Any]] = [
    {"type": "IMAGE_URL", "image_url": {"url": URL}},
    {"type": "image_url\x00", "image_url": {"url": URL}},
    {"type": " image_url", "image_url": {"url": URL}},
    {"type": ["image_url"], "image_url": {"url": URL}},
    {"type": "image_pil", "image_pil": "x"},
    {"image_pil": "x"},
    {"image_pil": "x", "uuid": "u", "type": "text"},
    {"type": "file", "file": {"file_data": URL}},
    {"type": "text", "text": {"type": "image_url", "image_url": {"url": URL}}},
    {"type": "tool_reference", "content": [image(1)]},
    {"type": "tool_result", "content": [image(1)]},
    {"type": "thinking", "thinking": [image(1)]},
    {"image_url": None},
    {"image_url": ""},
    {"image_url": {}},
    {"image_url": []},
    {"image_url": {"url": [URL]}},
    {"type": "image_url"},
    {"type": "image_url", "url": URL},
    {"type": "video_url", "image_url": {"url": URL}},
    {"type": "image_url", "video_url": {"url": URL}},
    {"type": "input_image", "input_image": URL},
    {"type": "input_image", "image_url": URL, "input_image": URL},
    {},
]


@pytest.mark.parametrize("part", LOOKALIKES, ids=json.dumps)
async def test_lookalikes_are_encoded_or_refused_or_no_media(cluster: Cluster, part: dict[str, Any]) -> None:
    reply = await cluster.proxy.chat(body_of(part, "?"))
    assert reply.status in {200, 400}
    if reply.status == 400:
        reply.error(400)
        assert not cluster.pd.calls
        return
    (call,) = cluster.pd.calls
    if cluster.encodes == 0:
        # It went on as it came: then it must be nothing that vLLM would read as media.
        assert call.body == body_of(part, "?")
        kind = part.get("type")
        assert isinstance(kind, str) or not part
        assert kind not in {"image_url", "input_image", "image_pil", "video_url"}


@pytest.mark.parametrize("where", ["name", "tool_calls", "reasoning", "x"])
async def test_other_keys_of_a_message_hold_no_media(cluster: Cluster, where: str) -> None:
    message = {"role": "user", "content": "hi", where: [image(1)]}
    body = json.dumps({"model": MODEL, "messages": [message]}).encode()
    assert (await cluster.proxy.chat(body)).status in {200, 400}
    assert all(call.body == body for call in cluster.pd.calls)


DEEP: list[dict[str, Any]] = [
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
    {
        "input": [
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": URL}],
            }
        ]
    },
    {"input": [{"type": "input_image", "image_url": URL}]},
    {"input": [{"content": [{"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}]}]},
    {"input": {"role": "user", "content": [{"image_url": URL}]}},
    {"previous_input_messages": [{"content": [{"type": "input_image", "image_url": URL}]}]},
    {"messages": [{"role": "user", "content": [image(1)]}]},
    {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": URL}}]}]},
    {"messages": [{"role": "user", "content": [{"image_url": None, "uuid": "u"}]}]},
    {"prompt": "x", "prompt_embeds": "AAAA"},
    {"prompt": None, "prompt_embeds": ["AAAA"]},
]
ELSEWHERE = ["/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("path", ELSEWHERE)
async def test_no_media_on_other_endpoints(cluster: Cluster, path: str, escaped: bool) -> None:
    for value in DEEP:
        written = json.dumps({"model": MODEL, **value})
        if escaped:
            for name in ("image", "audio", "video", "prompt_embeds", "uuid", "input", "messages"):
                written = written.replace(f'"{name}', f'"\\u{ord(name[0]):04x}{name[1:]}')
        (await cluster.proxy.request("POST", path, written.encode())).error(400)
    assert all(seen.method == "GET" for seen in cluster.pd.seen)


@pytest.mark.parametrize("path", ELSEWHERE)
async def test_words_about_media_are_no_media(cluster: Cluster, path: str) -> None:
    cluster.pd.always(refuse(418, "reached"), path)
    said = 'use {"type":"image_url","image_url":{"url":"x"}} or prompt_embeds'
    for value in ({"prompt": said}, {"input": said}, {"input": [said]}, {"messages": [{"content": said}]}):
        body = json.dumps({"model": MODEL, **value}).encode()
        assert (await cluster.proxy.request("POST", path, body)).status == 418, value


@pytest.mark.parametrize("path", [CHAT, *ELSEWHERE])
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/xml", "application/jsonp", "application/json-seq"]
)
async def test_no_other_content_type_gets_by(cluster: Cluster, path: str, kind: str) -> None:
    body = body_of(image(1))
    reply = await cluster.proxy.request("POST", path, body, {**JSON_TYPE, "content-type": kind})
    reply.error(400, 415)
    assert all(seen.method == "GET" for seen in cluster.pd.seen)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/comple%74ions",
        "/v1/comple%74ions",
        "/v1%2Fchat/completions",
        "//v1/chat/completions",
        "/v1/./chat/completions",
        "/v1/x/../chat/completions",
        "/v1/completions;x=1",
        "/V1/CHAT/COMPLETIONS",
        "/v1/chat/completions%00",
        "/v1/chat/completions/render",
        "/inference/v1/generate",
        "/pooling",
        "/classify",
        "/score",
        "/v1/audio/transcriptions",
        "/v1/messages",
        "/invocations",
    ],
)
async def test_paths_that_are_not_ours(cluster: Cluster, path: str) -> None:
    body = body_of(image(1))
    head = (
        f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    answer = await cluster.proxy.raw(head.encode() + body)
    status = int(answer.split()[1])
    assert status in {200, 400, 404, 405}
    if status == 200:
        assert cluster.encodes == 1
    else:
        assert all(seen.method == "GET" for seen in cluster.pd.seen)


async def test_get_with_a_body_is_no_way_in(cluster: Cluster) -> None:
    body = body_of(image(1))
    for method in ("GET", "PUT", "PATCH", "DELETE"):
        reply = await cluster.proxy.request(method, CHAT, body, JSON_TYPE)
        reply.error(405)
    reply = await cluster.proxy.request("GET", "/v1/models", body, JSON_TYPE)
    assert reply.status in {200, 400}
    for seen in cluster.pd.seen:
        assert seen.method == "GET"
        assert not seen.body


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
@pytest.mark.parametrize("path", ELSEWHERE)
async def test_no_media_in_another_encoding(cluster: Cluster, path: str, coding: str) -> None:
    # Python's json, which vLLM reads bodies with, takes all of these.
    for value in DEEP:
        written = json.dumps({"model": MODEL, **value}).encode(coding)
        (await cluster.proxy.request("POST", path, written)).error(400)
    assert all(seen.method == "GET" for seen in cluster.pd.seen)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{bad", b"[1]", b'"x"', b"null", b'{"prompt":NaN}', b'{"prompt":"\xff"}', b'{"a":1}{"b":2}',
        b'\xef\xbb\xbf\xef\xbb\xbf{"a":1}', b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ELSEWHERE)
async def test_nonsense_elsewhere_is_a_400(cluster: Cluster, path: str, body: bytes) -> None:
    (await cluster.proxy.request("POST", path, body)).error(400)
    assert all(seen.method == "GET" for seen in cluster.pd.seen)


@pytest.mark.parametrize(
    "body",
    [
        b'\xef\xbb\xbf{"prompt":"an image"}',
        b'{"prompt":"an image","seed":' + b"1" * 5000 + b',"a":[1e400,-0.0],"seed":5}',
        b'{"input":[' + b"1" * 5000 + b'],"image":1}',
        '{"prompt":"한국 image"}'.encode(),
    ],
)
async def test_what_is_no_media_passes_byte_for_byte(cluster: Cluster, body: bytes) -> None:
    cluster.pd.always(refuse(418, "reached"), "/v1/completions")
    assert (await cluster.proxy.request("POST", "/v1/completions", body)).status == 418
    assert cluster.pd.requests("/v1/completions")[0].body == body


async def test_a_request_with_many_images_holds_up_nobody(cluster: Cluster) -> None:
    body = body_of(*({"image_url": f"http://127.0.0.1:9/{n}"} for n in range(9000)))
    crowd = asyncio.ensure_future(cluster.proxy.chat(body))
    while not crowd.done():
        assert (await cluster.proxy.get("/livez")).seconds < 2.0
    assert "more than 32" in crowd.result().error(400)["message"]
    assert cluster.encodes == 0

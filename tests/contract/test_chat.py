"""Chat completions: shapes, streams, refusals, and what becomes of a request whose client is gone."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.contract.client import ask, body, get, image, metric, open_stream, part, png, post, text
from tests.contract.cluster import Cluster
from tests.contract.target import MODEL, until

MESSAGE = {"role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"}
CHOICE = {"index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"}
ANSWER = {
    *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
    *(
        "prompt_logprobs",
        "prompt_token_ids",
        "prompt_text",
        "kv_transfer_params",
        "ec_transfer_params",
        "metrics",
    ),
}


def test_an_answer(cluster: Cluster) -> None:
    reply = post(cluster.pd, body("Hello there", max_tokens=3), headers={"X-Request-Id": "mine"})
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    answer = reply.json()
    assert set(answer) == ANSWER
    assert (answer["id"], answer["object"], answer["model"]) == ("chatcmpl-mine", "chat.completion", MODEL)
    assert set(answer["choices"][0]) == CHOICE
    assert set(answer["choices"][0]["message"]) == MESSAGE
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 3
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    assert "x-request-id" not in reply.headers


def test_ids_are_made_where_none_is_given(cluster: Cluster) -> None:
    first, second = (ask(cluster.pd, "x", max_tokens=1).json()["id"] for _ in range(2))
    assert first.startswith("chatcmpl-")
    assert first != second


def test_an_id_may_be_used_twice_at_a_time(cluster: Cluster) -> None:
    with ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(post, cluster.pd, body("x"), headers={"X-Request-Id": "twin"}) for _ in range(2)]
        assert [s.result().json()["id"] for s in sent] == ["chatcmpl-twin", "chatcmpl-twin"]


def test_the_model_may_be_left_out_and_choices_counted(cluster: Cluster) -> None:
    payload = body("Hello", n=2, max_tokens=2, temperature=0.5, seed=1)
    del payload["model"]
    answer = post(cluster.pd, payload).json()
    assert answer["model"] == MODEL
    assert [c["index"] for c in answer["choices"]] == [0, 1]


def test_max_completion_tokens_wins(cluster: Cluster) -> None:
    answer = ask(cluster.pd, "Hello there", max_completion_tokens=2, max_tokens=7).json()
    assert answer["usage"]["completion_tokens"] == 2


def test_logprobs(cluster: Cluster) -> None:
    choice = ask(cluster.pd, "Hello there", max_tokens=2, logprobs=True, top_logprobs=2).json()["choices"][0]
    assert len(choice["logprobs"]["content"]) == 2
    for entry in choice["logprobs"]["content"]:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2


def test_a_stream(cluster: Cluster) -> None:
    reply = ask(cluster.pd, "Hello there", max_tokens=3, stream=True)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in reply.headers
    *events, done = reply.events()
    assert done == "[DONE]"
    chunks = [json.loads(e) for e in events]
    assert len({c["id"] for c in chunks}) == 1
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    first, *rest = (c["choices"][0] for c in chunks)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["prompt_token_ids"] is None
    assert len(rest) == 3
    assert all(set(c["delta"]) == {"content"} for c in rest)
    assert [c["finish_reason"] for c in rest] == [None, None, "length"]
    assert "stop_reason" in rest[-1]
    assert "stop_reason" not in rest[0]
    assert not any("usage" in c for c in chunks)
    assert "system_fingerprint" in chunks[-1]


def test_a_stream_with_usage(cluster: Cluster) -> None:
    reply = ask(cluster.pd, "Hello", max_tokens=2, stream=True, stream_options={"include_usage": True})
    *chunks, last = [json.loads(e) for e in reply.events()[:-1]]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert set(last["usage"]) == {"prompt_tokens", "total_tokens", "completion_tokens"}
    assert not any("usage" in c for c in chunks)


def test_a_stream_with_usage_in_every_chunk(cluster: Cluster) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = ask(cluster.pd, "Hello", max_tokens=2, stream=True, stream_options=options)
    chunks = [json.loads(e) for e in reply.events()[:-1]]
    assert [c["usage"]["completion_tokens"] for c in chunks] == [0, 1, 2, 2]


def test_an_encoder_answers_nothing(cluster: Cluster) -> None:
    for content in ([part()], "only text", [part(), part(), text()]):
        reply = ask(cluster.encoders[0], content, max_tokens=5)
        answer = reply.json()
        assert set(answer) == ANSWER
        choice = answer["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["prompt_tokens"] > 0
        assert answer["ec_transfer_params"] is None


def test_a_stream_of_an_encoder_is_a_role_and_an_end(cluster: Cluster) -> None:
    role, done = ask(cluster.encoders[0], [part()], stream=True).events()
    assert json.loads(role)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert done == "[DONE]"


def test_an_image_counts_its_tokens(cluster: Cluster) -> None:
    """Sides are rounded to 32 pixels; 64 tokens at least, 784 at most."""
    encoder = cluster.encoders[0]
    empty = ask(encoder, [part(url=image(png(8, 8)))]).json()["usage"]["prompt_tokens"] - 64
    for size, tokens in (((256, 256), 64), ((1024, 768), 768), ((640, 480), 300), ((3000, 3000), 784)):
        used = ask(encoder, [part(url=image(png(*size)))]).json()["usage"]["prompt_tokens"]
        assert used - empty == tokens


BODIES: dict[str, tuple[object, int, str, str | None]] = {
    "empty": (b"", 400, "Bad Request", "body"),
    "bad json": (b"{bad", 400, "Bad Request", "body.1"),
    "list": (b"[1,2]", 400, "Bad Request", "body"),
    "string": (b'"x"', 400, "Bad Request", "body"),
    "null": (b"null", 400, "Bad Request", "body"),
    "messages is a string": ({"messages": "hello"}, 400, "Bad Request", "body.messages"),
    "messages is null": ({"messages": None}, 400, "BadRequestError", None),
    "no messages": ({"model": MODEL}, 400, "Bad Request", "body.messages"),
    "no message": ({"model": MODEL, "messages": []}, 400, "BadRequestError", None),
    "unknown model": (body("x", model="nope"), 404, "NotFoundError", "model"),
    "stream is no boolean": (body("x", stream="maybe"), 400, "Bad Request", "body.stream"),
    "options without stream": (
        body("x", stream_options={"include_usage": True}),
        400,
        "BadRequestError",
        "stream_options",
    ),
    "NaN": (json.dumps(body("x", temperature=float("nan"))).encode(), 400, "BadRequestError", "temperature"),
    "cold": (body("x", temperature=-1), 400, "BadRequestError", "temperature"),
    "no tokens": (body("x", max_tokens=0), 400, "BadRequestError", "max_tokens"),
    "too many tokens": (body("x", max_tokens=100_000), 400, "BadRequestError", "max_tokens"),
    "too long": (body("hello " * 9000), 400, "BadRequestError", "input_tokens"),
    "no choice": (body("x", n=0), 400, "BadRequestError", None),
    "kwargs are no object": (
        body("x", mm_processor_kwargs=5),
        400,
        "Bad Request",
        "body.mm_processor_kwargs",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_refused_bodies(cluster: Cluster, name: str) -> None:
    payload, status, kind, param = BODIES[name]
    reply = post(cluster.pd, payload)
    assert reply.status == status, reply.body
    error = reply.error()
    assert (error["type"], error["param"]) == (kind, param)


@pytest.mark.parametrize(
    "payload",
    [
        b'{"model":"m","messages":[{"role":"user","content":"\xff\xfe"}],"max_tokens":1}',
        b'{"messages":[{"role":"user","content":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
    ],
    ids=["not utf-8", "deep"],
)
def test_bodies_that_cannot_even_be_parsed(cluster: Cluster, payload: bytes) -> None:
    reply = post(cluster.pd, payload)
    assert (reply.status, reply.json()) == (400, {"detail": "There was an error parsing the body"})


@pytest.mark.parametrize("kind", ["", "text/plain"])
def test_other_content_types(cluster: Cluster, kind: str) -> None:
    reply = post(cluster.pd, body("x"), headers={"Content-Type": kind})
    assert (reply.status, reply.error()["type"]) == (400, "Bad Request")
    assert "Only 'application/json' is allowed" in reply.error()["message"]


@pytest.mark.parametrize(
    "payload",
    [
        b"\xef\xbb\xbf" + json.dumps(body("x")).encode(),
        b'{"model":"m","max_tokens":9,"max_tokens":1,"messages":[{"role":"user","content":"x"}]}',
        body("x", unknown_key={"a": [1e300]}),
        body([]),
        {"model": MODEL, "messages": [{"role": "alien", "content": "x"}], "max_tokens": 1},
        body([{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm"}]),
    ],
    ids=["byte order mark", "doubled key", "unknown key", "no parts", "unknown role", "text-like parts"],
)
def test_bodies_that_pass(cluster: Cluster, payload: object) -> None:
    assert post(cluster.pd, payload).status == 200


def test_a_charset_in_the_content_type_passes(cluster: Cluster) -> None:
    assert (
        post(cluster.pd, body("x"), headers={"Content-Type": "application/json; charset=utf-8"}).status == 200
    )


def _part(kind: str, value: object, **more: Any) -> dict[str, Any]:
    return {"type": kind, kind: value, **more}


IMAGE = image(png())
PARTS: dict[str, tuple[object, int, str, str | None]] = {
    "a bare string": ("hello", 400, "BadRequestError", None),
    "a number": (1, 400, "BadRequestError", None),
    "an invented type": (_part("hologram_url", {"url": "x"}), 400, "BadRequestError", None),
    "type is a list": ({"type": ["image_url"]}, 400, "BadRequestError", None),
    "no known key": ({"foo": "bar"}, 400, "BadRequestError", None),
    "no type, url in an object": ({"image_url": {"url": IMAGE}}, 400, "BadRequestError", None),
    "image_url is a string": (_part("image_url", IMAGE), 400, "BadRequestError", None),
    "image_url is null": (_part("image_url", None), 400, "BadRequestError", None),
    "image_url is missing": ({"type": "image_url"}, 400, "BadRequestError", None),
    "only a uuid": ({"type": "image_url", "uuid": "u"}, 400, "BadRequestError", "type"),
    "detail is null": (_part("image_url", {"url": IMAGE, "detail": None}), 400, "BadRequestError", None),
    "input_image without detail": ({"type": "input_image", "image_url": IMAGE}, 400, "BadRequestError", None),
    "input_text": ({"type": "input_text", "text": "x"}, 400, "BadRequestError", None),
    "text without text": ({"type": "text"}, 400, "BadRequestError", None),
    "video": (_part("video_url", {"url": "data:video/mp4;base64,AAAA"}), 400, "BadRequestError", "video"),
    "audio": (_part("audio_url", {"url": "data:audio/wav;base64,AAAA"}), 400, "BadRequestError", "audio"),
    "input_audio": (_part("input_audio", {"data": "AAAA", "format": "wav"}), 400, "BadRequestError", "audio"),
    "embeddings": (_part("image_embeds", "AAAA"), 400, "BadRequestError", "image_embeds"),
    "an empty url": (_part("image_url", {"url": ""}), 400, "BadRequestError", None),
    "no base64": (_part("image_url", {"url": "data:image/png;base64,!!!!"}), 400, "BadRequestError", None),
    "no image": (_part("image_url", {"url": "data:image/png;base64,aGVsbG8="}), 400, "BadRequestError", None),
    "data without base64": (
        _part("image_url", {"url": "data:image/png,x"}),
        501,
        "NotImplementedError",
        None,
    ),
    "too long a strip": (_part("image_url", {"url": image(png(3, 900))}), 400, "BadRequestError", None),
    "ftp": (_part("image_url", {"url": "ftp://127.0.0.1/x"}), 400, "BadRequestError", None),
    "a local file": (_part("image_url", {"url": "file:///etc/passwd"}), 500, "InternalServerError", None),
    "nobody answers": (_part("image_url", {"url": "http://127.0.0.1:9/x"}), 500, "InternalServerError", None),
}


@pytest.mark.parametrize("name", PARTS)
def test_refused_parts(cluster: Cluster, name: str) -> None:
    content, status, kind, param = PARTS[name]
    reply = ask(cluster.encoders[0], [content])
    assert reply.status == status, reply.body
    assert (reply.error()["type"], reply.error()["param"]) == (kind, param)


def test_more_images_than_allowed(cluster: Cluster) -> None:
    for server in (cluster.pd, cluster.encoders[0]):
        error = ask(server, [part() for _ in range(9)]).error()
        assert error["param"] == "image"
        assert error["message"] == "At most 8 image(s) may be provided in one prompt. (parameter=image)"


@pytest.mark.parametrize(
    "content",
    [
        {"image_url": IMAGE},
        {"type": "image_url", "image_url": {"url": IMAGE, "detail": "high"}, "cache_control": {"type": "x"}},
        {"type": "image_url", "image_url": {"url": IMAGE.replace("image/png", "foo/bar")}},
        {"type": "image_url", "image_url": {"url": IMAGE}, "uuid": 5},
        {"type": "input_image", "image_url": IMAGE, "detail": "auto"},
    ],
    ids=["no type", "unknown keys", "odd media type", "uuid is a number", "input_image"],
)
def test_parts_that_pass(cluster: Cluster, content: object) -> None:
    assert ask(cluster.encoders[0], [content]).status == 200


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_images_may_stand_in_any_role(cluster: Cluster, role: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    before: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    if role == "tool":
        before.append({"role": "assistant", "content": None, "tool_calls": [call]})
    message = {"role": role, "content": [part()]} | ({"tool_call_id": "c"} if role == "tool" else {})
    messages = [message, *before] if role == "system" else [*before, message]
    reply = post(cluster.encoders[0], {"model": MODEL, "messages": messages, "max_tokens": 1})
    assert reply.status == 200, reply.body


def test_remote_images_are_fetched(cluster: Cluster) -> None:
    """From the cluster's own PD, which has no images, so the statuses tell how far the encoder came."""
    for path, status in (("/nothing", 422), ("/version", 400)):
        url = f"http://127.0.0.1:{cluster.pd.port}{path}"
        assert ask(cluster.encoders[0], [part(url=url)]).status == status
    until(lambda: "GET /version" in cluster.pd.log(), 5, "nothing was fetched")


@pytest.mark.parametrize("stream", [True, False])
def test_closing_the_connection_aborts(cluster: Cluster, stream: bool) -> None:
    pd = cluster.pd
    until(lambda: metric(pd, "vllm:num_requests_running") == 0, 10, "not idle")
    payload = body("go on", max_tokens=3900, ignore_eos=True, stream=stream)
    with open_stream(pd, payload) as connection:
        if stream:
            assert b"200 OK" in connection.recv(4096)
        until(lambda: metric(pd, "vllm:num_requests_running") == 1, 20, "it does not run")
    until(lambda: metric(pd, "vllm:num_requests_running") == 0, 10, "it was not aborted")
    assert get(pd, "/health").status == 200

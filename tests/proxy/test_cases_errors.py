"""Errors: whose they are, what the client is told, and which encoder is asked instead."""

import asyncio
import json

import pytest

from tests.fakes import CHAT, Exchange, Handler, hang, reset, shut
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, body_of, eventually, image, text, wait_for
from tests.proxy.upstreams import MODEL, completion, refuse

BAD_IMAGE = {
    "error": {
        "message": "cannot identify image",
        "type": "BadRequestError",
        "param": "messages",
        "code": 400,
    }
}


async def bad_image(exchange: Exchange) -> None:
    """What vLLM says to bytes that are no image."""
    await exchange.json(400, BAD_IMAGE)


async def test_an_encoders_refusal_ends_the_request_at_once(cluster: Cluster) -> None:
    bad, slow = cluster.encoders

    async def judge(exchange: Exchange) -> None:
        part = exchange.seen.json()["messages"][0]["content"][0]
        await (bad_image if part == {**image("bad"), "uuid": part.get("uuid")} else hang)(exchange)

    bad.always(judge)
    slow.always(judge)
    reply = await cluster.proxy.chat(body_of(image("bad"), image("good")), {"x-request-id": "refused"})
    error = reply.error(400)
    assert "cannot identify image" in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "messages", 400)
    assert cluster.encodes == 2, "a refusal is final: no retry"
    assert not cluster.pd.calls
    primers = [seen for encoder in cluster.encoders for seen in encoder.encodes]
    await wait_for(lambda: sum(bool(seen.closed_at) for seen in primers) == 1, "the sibling is aborted", 2.0)
    assert (await cluster.proxy.trace("refused")).outcome == "client_error"
    assert all(e.state == "ready" for e in (await cluster.proxy.state()).encoders)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
async def test_any_4xx_of_an_encoder_is_the_clients(cluster: Cluster, status: int) -> None:
    for encoder in cluster.encoders:
        encoder.always(refuse(status, "your fault"))
    for _ in range(8):
        reply = await cluster.proxy.chat(body_of(image(1)))
        assert "your fault" in reply.error(status)["message"]
    assert cluster.encodes == 8
    assert all(e.state == "ready" for e in (await cluster.proxy.state()).encoders), "no encoder is blamed"


async def odd_401(exchange: Exchange) -> None:
    """vLLM's own 401."""
    await exchange.json(401, {"error": "Unauthorized"})


async def html_404(exchange: Exchange) -> None:
    """What a stray web server says."""
    await exchange.answer(404, b"<h1>nothing here</h1>", (("content-type", "text/html"),))


async def empty_400(exchange: Exchange) -> None:
    """No reason at all."""
    await exchange.answer(400, b"", ())


@pytest.mark.parametrize(("how", "status"), [(odd_401, 401), (html_404, 404), (empty_400, 400)])
async def test_odd_refusals_of_an_encoder_become_openais_shape(
    cluster: Cluster, how: Handler, status: int
) -> None:
    for encoder in cluster.encoders:
        encoder.always(how)
    (await cluster.proxy.chat(body_of(image(1)))).error(status)
    assert not cluster.pd.calls


async def half_a_body(exchange: Exchange) -> None:
    """Promise more than is sent."""
    await exchange.start(200, [("content-type", "application/json")], length=5000)
    await exchange.send(b'{"choices":[')
    exchange.close()


async def no_json(exchange: Exchange) -> None:
    """A 200 that says nothing."""
    await exchange.answer(200, b"ok")


async def no_choices(exchange: Exchange) -> None:
    """A 200 of something else."""
    await exchange.json(200, {"object": "list"})


async def error_in_200(exchange: Exchange) -> None:
    """An error dressed as a success."""
    await exchange.json(200, {"error": {"message": "x", "type": "y", "param": None, "code": 500}})


async def empty_choices(exchange: Exchange) -> None:
    """A 200 without a single choice."""
    await exchange.json(200, {**completion("", 0), "choices": None})


async def no_content(exchange: Exchange) -> None:
    """204: nothing was encoded."""
    await exchange.answer(204, b"", ())


async def elsewhere(exchange: Exchange) -> None:
    """A redirect must not be followed."""
    await exchange.answer(307, b"", (("location", exchange.seen.path),))


async def array(exchange: Exchange) -> None:
    """JSON, but no object."""
    await exchange.json(200, ["choices"])


FAILURES: list[Handler] = [
    refuse(500, "EngineCore encountered an issue", "InternalServerError"),
    refuse(502, "bad gateway"),
    reset,
    shut,
    half_a_body,
    no_json,
    no_choices,
    error_in_200,
    empty_choices,
    no_content,
    elsewhere,
    array,
]


@pytest.mark.parametrize("how", FAILURES, ids=lambda how: how.__qualname__.split(".")[0])
async def test_a_failing_encoders_items_go_elsewhere(clusters: Clusters, how: Handler) -> None:
    cluster = await clusters.get("--eject-after", "3")
    bad, good = cluster.encoders
    bad.always(how)
    for _ in range(4):
        reply = await cluster.proxy.chat(body_of(image(1), text()))
        assert reply.status == 200, reply.body
    assert len(good.encodes) == 4
    uuids = [seen.json()["messages"][0]["content"][0]["uuid"] for seen in (*bad.encodes, *good.encodes)]
    assert len(set(uuids)) == len(uuids), "each attempt has an identity of its own"
    assert len({seen.header("x-request-id") for seen in (*bad.encodes, *good.encodes)}) == len(uuids)


async def test_an_encoder_that_refuses_connections_costs_nobody(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    bad, good = cluster.encoders
    await bad.stop(abort=True)
    for _ in range(6):
        assert (await cluster.proxy.chat(body_of(image(1)))).status == 200
    assert len(good.encodes) == 6

    async def out() -> bool:
        return (await cluster.proxy.state()).encoders[0].state in {"down", "ejected"}

    await eventually(out, "the dead encoder is out", 5)
    await bad.start()
    await cluster.ready(10)
    before = len(bad.encodes)
    for _ in range(4):
        assert (await cluster.proxy.chat(body_of(image(1)))).status == 200
    assert len(bad.encodes) == before + 2, "it gets its share again"


async def test_all_encoders_bad_is_a_5xx_with_the_last_reason(clusters: Clusters) -> None:
    cluster = await clusters.get("--eject-after", "1000", encoders=3)
    for encoder in cluster.encoders:
        encoder.always(refuse(500, "the tower is on fire", "InternalServerError"))
    reply = await cluster.proxy.chat(body_of(image(1)))
    assert "the tower is on fire" in reply.error(502, 503)["message"]
    assert 2 <= cluster.encodes <= 3
    assert all(len(encoder.encodes) <= 1 for encoder in cluster.encoders), "never the same one twice"
    assert not cluster.pd.calls


async def test_one_bad_encoder_of_one(clusters: Clusters) -> None:
    cluster = await clusters.get("--eject-after", "1000", encoders=1)
    cluster.encoders[0].always(refuse(500, "broken"))
    (await cluster.proxy.chat(body_of(image(1)))).error(500, 502, 503)
    assert cluster.encodes == 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("status", "retry_after"), [(429, "7"), (503, "Wed, 21 Oct 2026 07:28:00 GMT"), (500, "1"), (409, "0")]
)
async def test_the_pds_refusal_is_relayed_whole(
    cluster: Cluster, status: int, retry_after: str, streamed: bool
) -> None:
    body = b'{ "error" : {"message":"\\u0062usy","type":"T","param":null,"code":%d}}\n' % status

    async def handle(exchange: Exchange) -> None:
        await exchange.answer(
            status,
            body,
            [
                ("content-type", "application/json"),
                ("retry-after", retry_after),
                ("x-ratelimit-remaining-requests", "0"),
                ("x-ratelimit-reset-tokens", "6m0s"),
                ("set-cookie", "a=b"),
                ("server", "uvicorn-of-pd"),
                ("date", "Mon, 01 Jan 2001 00:00:00 GMT"),
                ("keep-alive", "timeout=99"),
                ("connection", "keep-alive, x-hop"),
                ("x-hop", "1"),
                ("proxy-authenticate", "Basic"),
                ("x-end-to-end", "yes"),
            ],
        )

    cluster.pd.always(handle)
    reply = await cluster.proxy.chat(body_of("hi", stream=streamed))
    assert reply.status == status
    assert reply.body == body
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["retry-after"] == retry_after
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert reply.headers["x-ratelimit-reset-tokens"] == "6m0s"
    assert reply.headers["x-end-to-end"] == "yes"
    for gone in ("set-cookie", "keep-alive", "x-hop", "proxy-authenticate"):
        assert gone not in reply.headers, gone
    assert reply.headers.get("server") != "uvicorn-of-pd"
    assert "2001" not in reply.headers.get("date", "")
    assert len(reply.headers.getall("content-length", [])) <= 1
    assert len(cluster.pd.calls) == 1


@pytest.mark.parametrize(
    "path", ["/nothing", "/v1/chat", "/v1/chat/completions/x", "/v1/models/x/y", "//", "/%00"]
)
async def test_unknown_paths_are_404_in_openais_shape(cluster: Cluster, path: str) -> None:
    (await cluster.proxy.get(path)).error(404, 400)
    assert all(seen.path.split("?")[0] in {"/health", "/metrics", "/v1/models"} for seen in cluster.pd.seen)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", CHAT), ("PUT", CHAT), ("DELETE", CHAT), ("POST", "/health"), ("POST", "/v1/models")],
)
async def test_wrong_methods_are_405_with_allow(cluster: Cluster, method: str, path: str) -> None:
    reply = await cluster.proxy.request(method, path, b"{}" if method != "GET" else None)
    reply.error(405)
    allowed = {name.strip() for name in reply.headers["allow"].split(",")}
    assert method not in allowed
    assert ("POST" if path == CHAT else "GET") in allowed


async def test_a_pd_whose_port_is_closed_is_a_503(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    await cluster.pd.die()
    for body in (body_of("hi"), body_of(image(1)), body_of("hi", stream=True)):
        (await cluster.proxy.chat(body)).error(502, 503)


async def test_a_401_of_the_pd_is_relayed_verbatim(cluster: Cluster) -> None:
    cluster.pd.always(odd_401)
    for streamed in (False, True):
        reply = await cluster.proxy.chat(body_of(image(1), stream=streamed))
        assert reply.status == 401
        assert reply.json() == {"error": "Unauthorized"}
        assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize("streamed", [False, True])
async def test_html_of_the_pd_is_relayed_as_html(cluster: Cluster, streamed: bool) -> None:
    async def html(exchange: Exchange) -> None:
        await exchange.answer(502, b"<html>nginx</html>", (("content-type", "text/html; charset=latin-1"),))

    cluster.pd.always(html)
    reply = await cluster.proxy.chat(body_of("hi", stream=streamed))
    assert (reply.status, reply.body) == (502, b"<html>nginx</html>")
    assert reply.headers["content-type"] == "text/html; charset=latin-1"


@pytest.mark.parametrize(
    "value",
    [
        [],
        "x",
        None,
        7,
        {"error": None},
        {"error": {"message": 7}},
        {"choices": None},
        {"usage": []},
        {"choices": [7]},
    ],
)
@pytest.mark.parametrize("status", [200, 400])
async def test_answers_of_any_shape_pass(cluster: Cluster, value: object, status: int) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.json(status, value)

    cluster.pd.always(handle)
    reply = await cluster.proxy.chat(body_of("hi"))
    assert (reply.status, reply.body) == (status, json.dumps(value).encode())


async def test_an_empty_answer_passes(cluster: Cluster) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.answer(204, b"", ())

    cluster.pd.always(handle)
    reply = await cluster.proxy.chat(body_of("hi"))
    assert (reply.status, reply.body) == (204, b"")


async def test_a_redirect_of_the_pd_is_not_followed(cluster: Cluster) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.answer(302, b"", (("location", "http://127.0.0.1:9/secret"),))

    cluster.pd.always(handle)
    assert (await cluster.proxy.chat(body_of("hi"))).status == 302
    assert len(cluster.pd.calls) == 1


async def test_errors_show_nothing_of_the_inside(cluster: Cluster) -> None:
    for body in (b"{bad", b"[]", body_of({"type": "video_url", "video_url": {"url": "secret-url"}})):
        reply = await cluster.proxy.chat(body)
        message = reply.error(400)["message"]
        assert "secret-url" not in message
        assert cluster.encoders[0].url not in message
        assert (
            "/" not in message.replace("http://", "").replace("application/json", "")
            or "site-packages" not in message
        )


async def test_two_failures_in_one_request_are_one_answer(cluster: Cluster) -> None:
    for encoder in cluster.encoders:
        encoder.always(bad_image)
    replies = await asyncio.gather(
        *(cluster.proxy.chat(body_of(*(image(n) for n in range(6)))) for _ in range(5))
    )
    for reply in replies:
        reply.error(400)
    assert not cluster.pd.calls


async def test_the_uuid_that_the_pd_gets_is_the_one_that_was_encoded(clusters: Clusters) -> None:
    cluster = await clusters.get("--eject-after", "1000")
    bad, good = cluster.encoders
    bad.then(refuse(500, "x"), half_a_body, no_json, path=CHAT)
    body = body_of(*(image(n) for n in range(4)), image(0))
    reply = await cluster.proxy.chat(body)
    assert reply.status == 200
    at_pd = [part["uuid"] for part in cluster.pd.calls[0].json()["messages"][0]["content"]]
    assert at_pd[0] == at_pd[4]
    assert len(set(at_pd)) == 4
    encoded = {seen.json()["messages"][0]["content"][0]["uuid"] for seen in (*bad.encodes, *good.encodes)}
    assert set(at_pd) <= encoded


async def test_the_model_is_named_by_nobody_but_the_pd(cluster: Cluster) -> None:
    cluster.pd.always(refuse(404, "The model `nope` does not exist.", "NotFoundError"))
    reply = await cluster.proxy.chat(body_of("hi", model="nope"))
    assert reply.error(404)["message"] == "The model `nope` does not exist."
    assert MODEL != "nope"

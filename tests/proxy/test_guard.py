"""Behind a guarded connector: delivery is required, a lost item is encoded once more, nobody sees it."""

import json

import pytest

from tests.fakes import Exchange, Handler
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, body_of, image, text
from tests.proxy.upstreams import DONE, Encoder, completion, event, sse, stream

ROLE = sse(
    json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ],
            "prompt_token_ids": None,
        }
    )
)
PLACEHOLDER = {"ec_transfer_params": {"ec_guard": {"h": "placeholder"}}}


def guarded(encoder: Encoder, word: str = "delivered") -> Handler:
    """What a guarded encoder answers."""

    async def handle(exchange: Exchange) -> None:
        body = exchange.seen.json()
        if word == "delivered":
            encoder.ledger.record(encoder.name, body, encoder.pd.started_at)
        uuid = body["messages"][0]["content"][0].get("uuid", "hash")
        await exchange.json(
            200, completion("", 0) | {"ec_transfer_params": {"ec_guard": {uuid: word}}, "kv": None}
        )

    return handle


async def lost(exchange: Exchange) -> None:
    """What vLLM answers to a request that the guard has failed."""
    if exchange.seen.json().get("stream"):
        await stream(ROLE, DONE)(exchange)
    else:
        await exchange.error(500, "Internal server error", "InternalServerError")


def all_guarded(cluster: Cluster) -> None:
    for encoder in cluster.encoders:
        encoder.always(guarded(encoder))


def uuids(cluster: Cluster) -> list[str]:
    """Of the PD's requests, in order."""
    return [call.json()["messages"][0]["content"][0]["uuid"] for call in cluster.pd.calls]


@pytest.mark.parametrize("word", ["pushed", "refused", "unsent", "unknown"])
async def test_an_item_that_did_not_arrive_goes_elsewhere(cluster: Cluster, word: str) -> None:
    first, second = cluster.encoders
    all_guarded(cluster)
    for encoder in (first, second):
        encoder.then(guarded(encoder, word))
    reply = await cluster.proxy.chat(body_of(image(1), text()), {"x-request-id": f"elsewhere-{word}"})
    # Whoever is asked first says so, and so does the other: two encoders, two failures.
    assert reply.error(502)["code"] == "encode_failed"
    assert f"the PD did not get it ({word})" in reply.json()["error"]["message"]
    assert not cluster.pd.calls
    first.then(guarded(first, word))
    second.once.clear()
    for _ in range(2):
        assert (await cluster.proxy.chat(body_of(image(1), text()))).status == 200
    assert {e.state for e in (await cluster.proxy.state()).encoders} == {"ready"}


async def test_a_lost_item_is_encoded_once_more_under_a_new_name(cluster: Cluster) -> None:
    all_guarded(cluster)
    cluster.pd.then(lost)
    reply = await cluster.proxy.chat(body_of(image(1), image(2), text()), {"x-request-id": "once-more"})
    assert (reply.status, reply.json()["choices"][0]["message"]["content"]) == (200, "ok")
    one, two = uuids(cluster)
    assert one != two
    assert cluster.encodes == 4
    ids = [call.header("x-request-id") for call in cluster.pd.calls]
    assert ids == ["once-more", "once-more-again"]
    encoder_ids = [seen.header("x-request-id") for e in cluster.encoders for seen in e.encodes]
    assert len(set(encoder_ids)) == 4
    trace = await cluster.proxy.trace("once-more")
    assert (trace.status, trace.outcome) == (200, "ok")
    assert [s.outcome for s in trace.spans if s.kind == "pd"] == ["error", "ok"]
    assert (await cluster.proxy.metrics())['eccon_proxy_retries_total{upstream="pd",reason="lost"}'] >= 1


async def test_lost_twice_is_the_pds_own_answer(cluster: Cluster) -> None:
    all_guarded(cluster)
    cluster.pd.then(lost, lost)
    reply = await cluster.proxy.chat(body_of(image(1), text()))
    assert reply.error(500)["message"] == "Internal server error"
    assert len(cluster.pd.calls) == 2


async def test_a_stream_of_a_role_alone_is_never_seen(cluster: Cluster) -> None:
    all_guarded(cluster)
    cluster.pd.then(lost)
    reply = await cluster.proxy.chat(body_of(image(1), text(), stream=True))
    assert reply.status == 200
    assert reply.body == event("ok") + event(None, "stop") + DONE
    assert len(set(uuids(cluster))) == 2
    cluster.pd.then(lost, lost)
    reply = await cluster.proxy.chat(body_of(image(1), text(), stream=True), {"x-request-id": "twice"})
    assert reply.error(502)["code"] == "item_lost"
    assert (await cluster.proxy.trace("twice")).outcome == "upstream_error"


async def test_a_good_stream_comes_byte_for_byte(cluster: Cluster) -> None:
    all_guarded(cluster)
    pieces = (ROLE[:30], ROLE[30:], b": ping\n\n", event("a"), event("b"), event(None, "stop"), DONE)
    cluster.pd.then(stream(*pieces))
    reply = await cluster.proxy.chat(body_of(image(1), text(), stream=True))
    assert reply.body == b"".join(pieces)


@pytest.mark.parametrize("streamed", [False, True])
async def test_zeros_in_place_of_an_item_are_an_error(cluster: Cluster, streamed: bool) -> None:
    all_guarded(cluster)

    async def garbage(exchange: Exchange) -> None:
        if streamed:
            chunk = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "length"}]}
            await stream(ROLE, sse(json.dumps(chunk | PLACEHOLDER)), DONE)(exchange)
        else:
            await exchange.json(200, completion("garbage") | PLACEHOLDER)

    cluster.pd.then(garbage)
    reply = await cluster.proxy.chat(body_of(image(1), text(), stream=streamed))
    assert reply.status == 200
    assert b"garbage" not in reply.body
    assert b"placeholder" not in reply.body
    cluster.pd.then(garbage, garbage)
    reply = await cluster.proxy.chat(body_of(image(1), text(), stream=streamed))
    assert reply.error(502)["code"] == "item_lost"


@pytest.mark.parametrize("split", [False, True])
async def test_an_end_without_a_reason_after_content_is_an_error(cluster: Cluster, split: bool) -> None:
    all_guarded(cluster)
    pieces = (ROLE, event("a"), DONE) if split else (ROLE, event("a") + DONE)
    cluster.pd.then(stream(*pieces))
    reply = await cluster.proxy.chat(body_of(image(1), text(), stream=True), {"x-request-id": "no-reason"})
    *before, told, done = [e for e in reply.body.split(b"\n\n") if e.strip()]
    assert b"\n\n".join([*before, b""]) == ROLE + event("a")
    message = "The PD ended the stream without a finish_reason"
    error = json.loads(told.strip().removeprefix(b"data: "))["error"]
    assert (error["message"], error["code"], error["type"]) == (message, "item_lost", "upstream_error")
    assert done + b"\n\n" == DONE
    trace = await cluster.proxy.trace("no-reason")
    assert (trace.outcome, trace.error) == ("upstream_error", message)
    assert len(cluster.pd.calls) == 1  # it is out already: not tried again


async def test_without_a_guard_nothing_is_held_or_tried_again(cluster: Cluster) -> None:
    cluster.pd.then(lost)
    reply = await cluster.proxy.chat(body_of(image(1), text()))
    assert reply.error(500)["message"] == "Internal server error"
    cluster.pd.then(lost)
    reply = await cluster.proxy.chat(body_of(image(1), text(), stream=True))
    assert reply.body == ROLE + DONE
    assert len(cluster.pd.calls) == 2


async def test_a_text_is_none_of_the_guards_business(cluster: Cluster) -> None:
    all_guarded(cluster)
    cluster.pd.then(lost)
    assert (await cluster.proxy.chat(body_of(text()))).status == 500
    cluster.pd.then(lost)
    reply = await cluster.proxy.chat(body_of(text(), stream=True))
    assert reply.body == ROLE + DONE


async def test_another_500_and_a_dead_engine_are_not_tried_again(cluster: Cluster) -> None:
    all_guarded(cluster)

    async def dead(exchange: Exchange) -> None:
        message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        await exchange.error(500, message, "InternalServerError")

    cluster.pd.then(dead)
    reply = await cluster.proxy.chat(body_of(image(1), text()))
    assert reply.error(500)["message"].startswith("EngineCore")
    assert len(cluster.pd.calls) == 1


async def test_on_requires_the_proof_and_off_ignores_it(clusters: Clusters) -> None:
    on = await clusters.get("--guard", "on")
    reply = await on.proxy.chat(body_of(image(1), text()))
    assert "it is not guarded" in reply.error(502)["message"]
    assert not on.pd.calls
    off = await clusters.get("--guard", "off")
    for encoder in off.encoders:
        encoder.always(guarded(encoder, "pushed"))
    off.lenient.add("ledger")
    assert (await off.proxy.chat(body_of(image(1), text()))).status == 200
    off.pd.then(lost)
    assert (await off.proxy.chat(body_of(image(1), text()))).status == 500


async def test_guarded_one_image_may_keep_its_name(clusters: Clusters) -> None:
    """The same in every turn; after a loss it is another, and so it is for what only an address tells of."""
    cluster = await clusters.get("--guard", "on", "--identity", "content")
    all_guarded(cluster)
    remote = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}
    for _ in range(2):
        assert (await cluster.proxy.chat(body_of(image(1), remote, text()))).status == 200
    cluster.pd.then(lost)
    assert (await cluster.proxy.chat(body_of(image(1), text()))).status == 200
    first, second, third, fourth = (json.loads(c.body)["messages"][0]["content"] for c in cluster.pd.calls)
    kept = first[0]["uuid"]
    assert [second[0]["uuid"] == kept, third[0]["uuid"] == kept, fourth[0]["uuid"] == kept] == [
        True, True, False,
    ]  # fmt: skip
    assert first[1]["uuid"] != second[1]["uuid"]

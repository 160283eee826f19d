"""Streams: relayed byte for byte, at once, and never with an end that the PD did not send."""

import asyncio
import hashlib
import json
import time

import aiohttp
import pytest

from tests.fakes import Exchange, Handler, hang, reset, shut
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, Reply, body_of, image, wait_for
from tests.proxy.upstreams import DONE, completion, event, refuse, sse, stream

STREAM = body_of("hi", stream=True)
STREAM_IMAGES = body_of(image(1), image(2), stream=True)


async def test_a_character_cut_in_two_survives(cluster: Cluster) -> None:
    whole = event("안녕🙂") + event(None, "stop") + DONE
    cut = whole.index("안".encode()) + 1
    first_arrived = asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.chunk(whole[:cut])
        await first_arrived.wait()
        await exchange.chunk(whole[cut:])
        await exchange.finish()

    cluster.pd.then(handle)
    async with cluster.proxy.open(STREAM) as answer:
        got = await answer.content.readexactly(cut)
        first_arrived.set()
        got += await answer.content.read()
    assert hashlib.sha256(got).digest() == hashlib.sha256(whole).digest()


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
async def test_the_status_is_the_pds_before_any_byte(cluster: Cluster, status: int) -> None:
    async def handle(exchange: Exchange) -> None:
        body = {"error": {"message": "because", "type": "T", "param": None, "code": status}}
        await exchange.json(status, body, [("retry-after", "7")])

    cluster.pd.always(handle)
    reply = await cluster.proxy.chat(STREAM)
    assert reply.error(status)["message"] == "because"
    assert reply.headers["retry-after"] == "7"
    assert len(cluster.pd.calls) == 1


async def half_a_head(exchange: Exchange) -> None:
    """Close inside the status line."""
    await exchange.send(b"HTTP/1.1 200 O")
    exchange.close()


async def no_http(exchange: Exchange) -> None:
    """Answer with something else than HTTP."""
    await exchange.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    exchange.close()


async def half_the_headers(exchange: Exchange) -> None:
    """Close between two headers."""
    await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
    exchange.close()


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("how", [shut, reset, half_a_head, no_http, half_the_headers])
async def test_a_pd_that_closes_before_any_byte_is_a_502(
    cluster: Cluster, how: Handler, streamed: bool, images: bool
) -> None:
    cluster.pd.always(how)
    reply = await cluster.proxy.chat(body_of(*([image(1)] if images else ["hi"]), stream=streamed))
    reply.error(502, 503)
    assert len(cluster.pd.calls) <= 2, "at most one retry, and that only of a reused connection"


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_encoders_400_is_a_400(cluster: Cluster, streamed: bool) -> None:
    for encoder in cluster.encoders:
        encoder.always(refuse(400, "bad image"))
    reply = await cluster.proxy.chat(body_of(image(1), stream=streamed))
    assert "bad image" in reply.error(400)["message"]
    assert not cluster.pd.calls


def assert_broken(reply: Reply, *sent: bytes) -> None:
    """The client got what the PD sent, at most one error event more, and no clean end."""
    assert reply.status == 200
    assert reply.broken, "the answer must not end well"
    assert reply.body.startswith(b"".join(sent))
    assert b"[DONE]" not in reply.body
    assert b'"finish_reason": "stop"' not in reply.body
    rest = reply.body[len(b"".join(sent)) :].strip()
    if rest:
        (line,) = [line for line in rest.split(b"\n") if line.startswith(b"data:")]
        error = json.loads(line[5:])["error"]
        assert error["message"]
        assert error["type"]
        assert {"param", "code"} <= set(error)


async def ends_by_reset(exchange: Exchange) -> None:
    """One event, then a TCP RST."""
    await exchange.start()
    await exchange.chunk(event("one"))
    await relayed(exchange)
    exchange.reset()


async def ends_without_last_chunk(exchange: Exchange) -> None:
    """One event, then a FIN where the last chunk should be."""
    await exchange.start()
    await exchange.chunk(event("one"))
    exchange.close()


async def ends_inside_a_chunk(exchange: Exchange) -> None:
    """A chunk that promises more than comes."""
    await exchange.start()
    await exchange.send(b"%x\r\n" % (len(event("one")) + 100) + event("one"))
    exchange.close()


async def ends_by_nonsense(exchange: Exchange) -> None:
    """A chunk size that is none."""
    await exchange.start()
    await exchange.chunk(event("one"))
    await exchange.send(b"nonsense\r\n")
    exchange.close()


async def relayed(exchange: Exchange) -> None:
    """Give what was written time to leave: a reset drops what the peer has not read."""
    loop = asyncio.get_running_loop()
    turns = loop.time() + 0.05
    while loop.time() < turns:
        await asyncio.sleep(0.01)
    assert not exchange.peer_gone


@pytest.mark.parametrize(
    "how", [ends_by_reset, ends_without_last_chunk, ends_inside_a_chunk, ends_by_nonsense]
)
async def test_a_stream_that_breaks_does_not_end_well(cluster: Cluster, how: Handler) -> None:
    cluster.pd.then(how)
    reply = await cluster.proxy.chat(STREAM, {"x-request-id": "broken-" + how.__name__})
    assert_broken(reply, event("one"))
    assert len(cluster.pd.calls) == 1, "never replayed"
    trace = await cluster.proxy.trace("broken-" + how.__name__)
    assert trace.outcome == "upstream_error"
    assert trace.error


@pytest.mark.parametrize("promised", [10, 10_000])
async def test_a_whole_answer_that_breaks_off_is_an_error(cluster: Cluster, promised: int) -> None:
    body = json.dumps(completion("x" * 200)).encode()

    async def handle(exchange: Exchange) -> None:
        await exchange.start(200, [("content-type", "application/json")], length=len(body) + promised)
        await exchange.send(body)
        exchange.close()

    cluster.pd.then(handle)
    reply = await cluster.proxy.chat(body_of("hi"))
    assert reply.broken or reply.error(502)
    counts = await cluster.proxy.metrics()
    assert any("upstream_error" in key and value for key, value in counts.items())


async def test_error_events_inside_a_200_count_as_errors(cluster: Cluster) -> None:
    failure = sse(
        '{"error":{"message":"EngineCore died","type":"InternalServerError","param":null,"code":500}}'
    )
    cluster.pd.then(stream(event("one"), failure, DONE))
    reply = await cluster.proxy.chat(STREAM, {"x-request-id": "inside"})
    assert reply.status == 200
    assert reply.body == event("one") + failure + DONE
    assert not reply.broken
    assert (await cluster.proxy.trace("inside")).outcome == "upstream_error"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_while_encoding(cluster: Cluster, streamed: bool) -> None:
    for encoder in cluster.encoders:
        encoder.always(hang)
    request_id = f"left-{streamed}"
    asked = asyncio.ensure_future(
        cluster.proxy.chat(body_of(image(1), image(2), stream=streamed), {"x-request-id": request_id})
    )
    await wait_for(lambda: cluster.encodes == 2, "both items at encoders")
    left_at = time.monotonic()
    asked.cancel()
    primers = [seen for encoder in cluster.encoders for seen in encoder.encodes]
    await wait_for(lambda: all(seen.closed_at for seen in primers), "both encodes aborted", 2.0)
    assert all(seen.closed_at and seen.closed_at - left_at < 1.0 for seen in primers)
    await cluster.idle(2.0)
    assert not cluster.pd.calls
    trace = await cluster.proxy.trace(request_id)
    assert (trace.status, trace.outcome) == (499, "client_closed")
    assert all(e.state == "ready" for e in (await cluster.proxy.state()).encoders)


async def test_the_usage_chunk_reaches_client_and_trace(cluster: Cluster) -> None:
    usage = sse(
        '{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[],'
        '"usage":{"prompt_tokens":11,"completion_tokens":7,"total_tokens":18}}'
    )
    cluster.pd.then(stream(event("a"), event(None, "stop"), usage, DONE))
    body = body_of(image(1), stream=True, stream_options={"include_usage": True})
    reply = await cluster.proxy.chat(body, {"x-request-id": "usage"})
    assert reply.body == event("a") + event(None, "stop") + usage + DONE
    (primer,) = [seen.json() for encoder in cluster.encoders for seen in encoder.encodes]
    assert "stream_options" not in primer
    trace = await cluster.proxy.trace("usage")
    assert (trace.prompt_tokens, trace.completion_tokens) == (11, 7)


async def test_events_pass_verbatim_and_at_once(cluster: Cluster) -> None:
    pieces = [
        b": keep-alive\n\n",
        event("crlf").replace(b"\n", b"\r\n"),
        b'data: {"choices":[{"del',
        b'ta":{"content":"thi',
        b'rds"}}]}\n\n',
        b"event: x\nid: 7\nretry: 10\ndata\ndata:\n\n",
        *(event(f"token {n}") for n in range(5)),
        event(None, "stop"),
        DONE,
    ]
    arrived = asyncio.Event()
    arrived.set()

    async def handle(exchange: Exchange) -> None:
        await exchange.start()
        for piece in pieces:
            await arrived.wait()
            arrived.clear()
            await exchange.chunk(piece)
        await exchange.finish()

    cluster.pd.then(handle)
    async with cluster.proxy.open(STREAM, {"accept-encoding": "gzip, br"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in answer.headers
        assert "content-encoding" not in answer.headers
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        for piece in pieces:
            # Each is sent only when the one before is here: nothing may wait for more.
            assert await asyncio.wait_for(answer.content.readexactly(len(piece)), 2.0) == piece
            arrived.set()
        assert await answer.content.read() == b""


async def test_first_byte_is_not_held_for_the_second(cluster: Cluster) -> None:
    go = asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        await exchange.start()
        await go.wait()
        await exchange.chunk(DONE)
        await exchange.finish()

    cluster.pd.then(handle)

    async def ask() -> None:
        async with cluster.proxy.open(STREAM) as answer:
            assert answer.status == 200, "the head comes before the first event"
            go.set()
            assert await answer.content.read() == DONE

    await asyncio.wait_for(ask(), 5)


async def test_long_lines_pass(cluster: Cluster) -> None:
    line = b'data: {"choices":[{"delta":{"content":"' + b"x" * 300_000 + b'"}}]}\n\n'
    endless = b'data: {"choices":[{"delta":{"content":"' + b"y" * 3_000_000

    async def slowly(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.chunk(line)
        for at in range(0, len(endless), 65536):
            await exchange.chunk(endless[at : at + 65536])
            await asyncio.sleep(0.1)  # five seconds without an end of line
        await exchange.chunk(b'"}}]}\n\n')
        await exchange.chunk(DONE)
        await exchange.finish()

    cluster.pd.then(slowly)
    reply = await cluster.proxy.chat(STREAM, {"x-request-id": "long"})
    assert (
        hashlib.sha256(reply.body).digest() == hashlib.sha256(line + endless + b'"}}]}\n\n' + DONE).digest()
    )
    assert not reply.broken
    assert (await cluster.proxy.trace("long")).outcome == "ok"
    assert len((await cluster.proxy.admin("GET", "/admin/traces/long")).body) < 65536


async def test_a_client_that_stops_reading_holds_the_pd_back(clusters: Clusters) -> None:
    cluster = await clusters.get()
    block, blocks = b"data: " + b"z" * 65528 + b"\n\n", 3200
    sent = 0
    ended = asyncio.Event()

    async def flood(exchange: Exchange) -> None:
        nonlocal sent
        try:
            await exchange.start()
            for _ in range(blocks):
                await exchange.chunk(block)
                sent += len(block)
            await exchange.finish()
        finally:
            ended.set()

    cluster.pd.then(flood)
    before = cluster.proxy.rss
    async with cluster.proxy.open(STREAM) as answer:
        await answer.content.readexactly(1000)
        answer.connection.transport.pause_reading()  # type: ignore[union-attr]
        # As long as the case says, which is longer than a PD may be silent before it is asked if it moves.
        over = time.monotonic() + 20
        seen = []
        while time.monotonic() < over:
            await asyncio.sleep(1)  # it does not read: that is the input of the case
            seen.append(sent)
            assert (await cluster.proxy.chat(body_of("other"))).status == 200
        assert len(set(seen[5:])) == 1, "the PD is held back"
        assert seen[-1] < blocks * len(block) // 2
        assert cluster.proxy.rss < before + 20_000_000
        assert (await cluster.proxy.state()).pds[0].state == "ready"
        left_at = time.monotonic()
    await asyncio.wait_for(ended.wait(), 5)
    assert time.monotonic() - left_at < 2.0
    assert cluster.pd.calls[0].closed_at


async def test_a_relay_of_many_megabytes_is_whole_and_small(cluster: Cluster) -> None:
    block = event("w" * 65000)
    cluster.pd.then(stream(*[block] * 500, DONE))
    before = cluster.proxy.rss
    reply = await cluster.proxy.chat(STREAM)
    assert reply.body == block * 500 + DONE
    assert cluster.proxy.rss < before + 30_000_000


async def test_an_early_end_without_done_is_relayed_as_it_is(cluster: Cluster) -> None:
    cluster.pd.then(stream(event("a"), event(None, "stop")))
    reply = await cluster.proxy.chat(STREAM)
    assert reply.body == event("a") + event(None, "stop")
    assert b"[DONE]" not in reply.body


async def test_an_answer_that_ends_with_its_connection_is_whole(cluster: Cluster) -> None:
    async def http10(exchange: Exchange) -> None:
        data = event("a") + event(None, "stop") + DONE
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + data)
        exchange.close()

    cluster.pd.then(http10)
    reply = await cluster.proxy.chat(STREAM)
    assert reply.body == event("a") + event(None, "stop") + DONE
    assert not reply.broken


async def test_a_stream_answer_to_a_plain_request_and_the_reverse(cluster: Cluster) -> None:
    cluster.pd.then(stream())
    reply = await cluster.proxy.chat(body_of("hi"))
    assert reply.headers["content-type"].startswith("text/event-stream")
    cluster.pd.then(cluster.pd.models)
    reply = await cluster.proxy.chat(STREAM)
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["object"] == "list"


async def test_two_hundred_streams_at_once(cluster: Cluster) -> None:
    replies = await asyncio.gather(
        *(cluster.proxy.chat(STREAM_IMAGES if n % 4 == 0 else STREAM) for n in range(200))
    )
    wanted = event("ok") + event(None, "stop") + DONE
    assert all(reply.status == 200 and reply.body == wanted and not reply.broken for reply in replies)


async def test_a_broken_first_connection_is_no_answer(cluster: Cluster) -> None:
    """Trailing data after a whole answer is not a second answer to somebody else."""

    async def chatty(exchange: Exchange) -> None:
        await exchange.json(200, completion("mine"))
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nWRONG")

    cluster.pd.then(chatty)
    assert (await cluster.proxy.chat(body_of("hi"))).json()["choices"][0]["message"]["content"] == "mine"
    for _ in range(3):
        reply = await cluster.proxy.chat(body_of("hi"))
        assert reply.status in {200, 502}
        assert b"WRONG" not in reply.body


async def test_interim_answers_are_not_the_answer(cluster: Cluster) -> None:
    async def early(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
        await exchange.json(200, completion())

    cluster.pd.then(early)
    assert (await cluster.proxy.chat(body_of("hi"))).status == 200


async def test_connections_closed_by_clients_do_not_disturb_others(cluster: Cluster) -> None:
    go = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.chunk(event("a"))
        while not go.is_set():
            await exchange.chunk(event("."))
            await asyncio.sleep(0.02)
        await exchange.chunk(DONE)
        await exchange.finish()

    cluster.pd.always(slow)
    kept = [asyncio.ensure_future(cluster.proxy.chat(STREAM)) for _ in range(5)]
    left = [asyncio.ensure_future(cluster.proxy.chat(STREAM)) for _ in range(5)]
    await wait_for(lambda: len(cluster.pd.calls) == 10, "all ten at the PD")
    for task in left:
        task.cancel()
    await wait_for(lambda: sum(bool(seen.closed_at) for seen in cluster.pd.calls) == 5, "five aborted", 2.0)
    go.set()
    replies = await asyncio.gather(*kept)
    assert all(reply.body.endswith(DONE) and not reply.broken for reply in replies)


async def test_the_client_session_sees_no_second_error(cluster: Cluster) -> None:
    cluster.pd.then(ends_without_last_chunk)
    with pytest.raises(aiohttp.ClientPayloadError):
        async with cluster.proxy.open(STREAM) as answer:
            await answer.read()

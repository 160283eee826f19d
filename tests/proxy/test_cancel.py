"""A client that leaves: whatever its request waited for is let go within a second."""

import asyncio
import socket
import struct
import time

import pytest

from tests.fakes import CHAT, Exchange, hang
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, body_of, data_url, eventually, image, wait_for
from tests.proxy.upstreams import after, event, stream

GONE = 1.0
"""Seconds within which everybody upstream must know."""


async def half_a_stream(exchange: Exchange) -> None:
    """One event, then silence."""
    await exchange.start()
    await exchange.chunk(event("a"))
    await exchange.until_gone()


async def half_a_body(exchange: Exchange) -> None:
    """The head and a piece of a whole answer, then silence."""
    await exchange.start(200, [("content-type", "application/json")], length=5000)
    await exchange.send(b'{"choices":')
    await exchange.until_gone()


def raw_request(body: bytes, request_id: str) -> bytes:
    """A chat request as bytes."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        f"x-request-id: {request_id}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@pytest.mark.parametrize("way", ["fin", "rst"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("state", ["encoding", "at the PD", "headers", "streaming"])
async def test_client_gone(cluster: Cluster, state: str, streamed: bool, way: str) -> None:
    if state == "encoding":
        for encoder in cluster.encoders:
            encoder.always(hang)
    else:
        at_pd = {"at the PD": hang, "headers": half_a_body, "streaming": half_a_stream}[state]
        cluster.pd.always(at_pd)
    request_id = f"gone-{state.replace(' ', '-')}-{streamed}-{way}"
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.proxy.port)
    writer.write(raw_request(body_of(image(1), image(2), stream=streamed), request_id))
    await wait_for(lambda: cluster.encodes == 2, "two items at encoders")
    if state != "encoding":
        await wait_for(lambda: cluster.pd.calls, "at the PD")
    if state == "streaming":
        await asyncio.wait_for(reader.readuntil(event("a")), 5)
    at = time.monotonic()
    if way == "rst":
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()
    waiting = [
        seen
        for seen in [*(s for e in cluster.encoders for s in e.encodes), *cluster.pd.calls]
        if seen.done_at is None
    ]
    assert waiting
    await wait_for(lambda: all(seen.closed_at for seen in waiting), "upstream is told", 3)
    assert max(seen.closed_at or 0.0 for seen in waiting) - at < GONE
    await cluster.idle(2)
    if state == "encoding":
        assert not cluster.pd.calls
    trace = await cluster.proxy.trace(request_id)
    assert (trace.status, trace.outcome) == (499, "client_closed")
    assert [e.state for e in (await cluster.proxy.state()).encoders] == ["ready", "ready"]
    cluster.pd.always(cluster.pd.chat)
    assert (await cluster.proxy.chat(body_of("still here"))).status == 200


@pytest.mark.parametrize("size", [300_000, 4_000_000])
async def test_a_client_with_a_large_body_that_leaves_is_gone(cluster: Cluster, size: int) -> None:
    for encoder in cluster.encoders:
        encoder.always(hang)
    part = {"type": "image_url", "image_url": {"url": data_url(size, size)}}
    _, writer = await asyncio.open_connection("127.0.0.1", cluster.proxy.port)
    writer.write(raw_request(body_of(part, image(2)), f"large-{size}"))
    await wait_for(lambda: cluster.encodes == 2, "two items at encoders", 20)
    at = time.monotonic()
    writer.close()
    seen = [s for encoder in cluster.encoders for s in encoder.encodes]
    await wait_for(lambda: all(s.closed_at for s in seen), "the encoders are told", 5)
    assert max(s.closed_at or 0.0 for s in seen) - at < GONE
    await cluster.idle(2)
    assert (await cluster.proxy.trace(f"large-{size}")).outcome == "client_closed"


async def test_gone_while_queued(clusters: Clusters) -> None:
    cluster = await clusters.get("--max-inflight", "1", "--queue", "5")
    go = asyncio.Event()
    cluster.pd.then(after(go, stream()))
    first = asyncio.ensure_future(cluster.proxy.chat(body_of("hi", stream=True)))
    await wait_for(lambda: cluster.pd.calls, "one in flight")
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1)), {"x-request-id": "queued"}))

    async def queued(count: int) -> bool:
        return (await cluster.proxy.state()).queued == count

    await eventually(lambda: queued(1), "queued")
    asked.cancel()
    await eventually(lambda: queued(0), "left the queue", 2)
    go.set()
    await first
    assert cluster.encodes == 0
    trace = await cluster.proxy.trace("queued")
    assert (trace.status, trace.outcome) == (499, "client_closed")


async def test_gone_while_uploading(cluster: Cluster) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", cluster.proxy.port)
    raw = raw_request(body_of(image(1)), "upload")
    writer.write(raw[:-20])
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await cluster.idle()
    assert cluster.encodes == 0
    assert not cluster.pd.calls


async def test_gone_during_a_retry(clusters: Clusters) -> None:
    cluster = await clusters.get("--encode-timeout", "0.3", "--eject-after", "1000")
    for encoder in cluster.encoders:
        encoder.always(hang)
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1)), {"x-request-id": "retry"}))
    await wait_for(lambda: cluster.encodes == 2, "the second attempt")
    asked.cancel()
    primers = [seen for encoder in cluster.encoders for seen in encoder.encodes]
    await wait_for(lambda: all(seen.closed_at for seen in primers), "both aborted", 2)
    assert cluster.encodes == 2
    assert (await cluster.proxy.trace("retry")).status == 499


async def test_gone_while_waiting_for_room_at_the_pd(clusters: Clusters) -> None:
    cluster = await clusters.get("--pd-items", "2", "--queue-timeout", "30")
    go = asyncio.Event()
    cluster.pd.then(after(go, cluster.pd.chat))
    first = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1), image(2))))
    await wait_for(lambda: cluster.pd.calls, "the PD is full of items")
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image(3)), {"x-request-id": "room"}))

    async def known() -> bool:
        return any(trace.id == "room" for trace in await cluster.proxy.traces(5))

    await eventually(known, "it waits")
    asked.cancel()

    async def over() -> bool:
        return (await cluster.proxy.trace("room")).status == 499

    await eventually(over, "it left", 2)
    go.set()
    assert (await first).status == 200
    assert len(cluster.pd.calls) == 1


async def test_gone_from_other_endpoints(cluster: Cluster) -> None:
    cluster.pd.always(hang, "/v1/completions")
    cluster.pd.always(hang, "/v1/models", "GET")
    for method, path, body in (("POST", "/v1/completions", b'{"prompt":"x"}'), ("GET", "/v1/models", None)):
        before = len(cluster.pd.requests(path, method))
        asked = asyncio.ensure_future(cluster.proxy.request(method, path, body))
        await wait_for(lambda: len(cluster.pd.requests(path, method)) > before, "at the PD")  # noqa: B023
        at = time.monotonic()
        asked.cancel()
        seen = cluster.pd.requests(path, method)[-1]
        await wait_for(lambda: seen.closed_at, "the PD is told", 3)  # noqa: B023
        assert (seen.closed_at or 0.0) - at < GONE


async def test_a_hundred_leave_at_once(cluster: Cluster) -> None:
    for encoder in cluster.encoders:
        encoder.always(hang)
    asked = [asyncio.ensure_future(cluster.proxy.chat(body_of(image(n)))) for n in range(30)]
    await wait_for(lambda: cluster.encodes >= 30, "all at encoders")
    for task in asked:
        task.cancel()
    primers = [seen for encoder in cluster.encoders for seen in encoder.encodes]
    await wait_for(lambda: all(seen.closed_at for seen in primers), "all aborted", 3)
    for encoder in cluster.encoders:
        encoder.always(encoder.chat)
    assert (await cluster.proxy.chat(body_of(image(1)))).status == 200


async def test_a_half_closed_client_still_gets_its_answer_or_is_gone(cluster: Cluster) -> None:
    raw = raw_request(body_of("hi"), "half").replace(b"host: a", b"host: a\r\nconnection: close")
    answer = await cluster.proxy.raw(raw, 3, eof=True)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 200")

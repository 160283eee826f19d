"""Connections: none leaks, none waits for ever, slow clients harm nobody, and the end is orderly."""

import asyncio
import contextlib
import json
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator

import pytest

from tests.fakes import CHAT, Exchange, hang
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, body_of, eventually, image, wait_for
from tests.proxy.upstreams import DONE, after, event, stream


async def test_unread_answers_leave_no_connection(cluster: Cluster) -> None:
    async def long_refusal(exchange: Exchange) -> None:
        await exchange.answer(400, json.dumps({"error": {"message": "x" * 2_000_000}}).encode())

    for encoder in cluster.encoders:
        encoder.always(long_refusal)
    base = cluster.proxy.fds
    body = body_of(*(image(n) for n in range(4)))
    for _ in range(12):
        for reply in await asyncio.gather(*(cluster.proxy.chat(body) for _ in range(5))):
            reply.error(400)
            assert len(reply.body) < 100_000, "a refusal of 2 MB is cut"
    # What stays open is idle in the pool, and vLLM would close it after 5 s: ours goes before that.
    await wait_for(lambda: not any(fake.busy for fake in cluster.fakes), "no request left at an upstream", 2)
    await wait_for(lambda: cluster.proxy.fds <= base + 5, "descriptors back to base", 5)


async def test_idle_connections_go_before_vllm_closes_them(cluster: Cluster) -> None:
    await asyncio.gather(*(cluster.proxy.chat(body_of(image(n))) for n in range(20)))
    at = time.monotonic()
    probing = len(cluster.fakes) * 2
    await wait_for(
        lambda: sum(len(fake.connections) for fake in cluster.fakes) <= probing, "the pool emptied itself", 5
    )
    assert time.monotonic() - at < 5.0


async def test_connections_are_reused(cluster: Cluster) -> None:
    before = sum(fake.accepted for fake in cluster.fakes)
    for _ in range(20):
        assert (await cluster.proxy.chat(body_of(image(1)))).status == 200
    assert sum(fake.accepted for fake in cluster.fakes) - before < 15


async def test_an_encoder_that_never_answers_is_left_for_another(clusters: Clusters) -> None:
    cluster = await clusters.get("--encode-timeout", "0.4", "--eject-after", "1000")
    silent, good = cluster.encoders
    silent.always(hang)
    for _ in range(2):
        reply = await cluster.proxy.chat(body_of(image(1)))
        assert reply.status == 200
        assert reply.seconds < 3
    assert len(silent.encodes) == 1
    await wait_for(lambda: all(seen.closed_at for seen in silent.encodes), "the hung encode is aborted", 2)
    good.always(hang)
    reply = await cluster.proxy.chat(body_of(image(2)))
    reply.error(504)
    assert not [call for call in cluster.pd.calls if image(2)["image_url"]["url"].encode() in call.body]


async def test_half_an_answer_of_an_encoder_is_no_answer(clusters: Clusters) -> None:
    cluster = await clusters.get("--encode-timeout", "0.4", "--eject-after", "1000")

    async def stuck(exchange: Exchange) -> None:
        await exchange.start(200, [("content-type", "application/json")], length=500)
        await exchange.send(b'{"choices":[{')
        await exchange.until_gone()

    cluster.encoders[0].always(stuck)
    for _ in range(2):
        assert (await cluster.proxy.chat(body_of(image(1)))).status == 200
    assert len(cluster.encoders[1].encodes) == 2


@contextlib.asynccontextmanager
async def full_backlog(port: int = 0) -> AsyncIterator[str]:
    """The URL of a listener whose backlog is full: connects hang."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_connect_that_hangs_is_cut_short(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--connect-timeout", "0.3", "--eject-after", "1000")
    async with full_backlog() as url:
        answer = await cluster.proxy.admin("POST", "/admin/encoders?force=true", {"url": url, "id": "full"})
        assert answer.status == 201
        for _ in range(3):
            reply = await cluster.proxy.chat(body_of(image(1)))
            assert reply.status == 200
            assert reply.seconds < 3
        state = {e.id: e.state for e in (await cluster.proxy.state()).encoders}
        assert state["full"] != "ready"
        assert (await cluster.proxy.admin("DELETE", "/admin/encoders/full?now=true")).status == 200


async def test_the_connect_limit_as_shipped(clusters: Clusters) -> None:
    # Probed so seldom that only the items find out.
    cluster = await clusters.fresh("--probe-interval", "60")
    stuck, good = cluster.encoders
    await stuck.stop(abort=True)
    async with full_backlog(stuck.port):
        replies = [await cluster.proxy.chat(body_of(image(n))) for n in range(2)]
        assert {reply.status for reply in replies} == {200}
        assert len(good.encodes) == 2
        slowest = max(reply.seconds for reply in replies)
        assert slowest > 2, "one of them met the listener that is full"
        limit = (await cluster.proxy.admin("GET", "/admin/settings")).json()["connect_timeout"]
        assert limit <= 5
        assert slowest < limit + 5


async def test_a_stream_is_not_cut_while_tokens_come(clusters: Clusters) -> None:
    # A token every 20 s for ten minutes, a hundred times as fast, and so are the limits as shipped.
    cluster = await clusters.get(
        "--stream-idle-timeout", "3", "--first-byte-timeout", "6", "--encode-timeout", "0.6"
    )

    async def slow(exchange: Exchange) -> None:
        await exchange.start()
        for _ in range(30):
            await quiet(0.2)
            await exchange.chunk(event("t"))
        await exchange.chunk(DONE)
        await exchange.finish()

    cluster.pd.then(slow)
    reply = await cluster.proxy.chat(body_of("hi", stream=True))
    assert reply.seconds >= 6, "longer than every limit"
    assert reply.events.count("[DONE]") == 1
    assert len(reply.events) == 31
    assert not reply.broken
    assert reply.body.endswith(DONE)


async def quiet(seconds: float) -> None:
    """Be silent on purpose: the silence is the input of the case."""
    over = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < over:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("events", [0, 1])
async def test_a_pd_silent_after_headers_ends_as_a_broken_stream(clusters: Clusters, events: int) -> None:
    cluster = await clusters.get(
        "--stream-idle-timeout", "0.5", "--first-byte-timeout", "0.6", "--encode-timeout", "0.4"
    )

    async def silent(exchange: Exchange) -> None:
        await exchange.start()
        for _ in range(events):
            await exchange.chunk(event("one"))
        await exchange.until_gone()

    cluster.pd.then(silent)
    reply = await cluster.proxy.chat(body_of("hi", stream=True))
    assert reply.status == 200
    assert reply.broken, "no end that looks like one"
    assert reply.body.startswith(event("one") * events)
    (last,) = reply.events[events:]
    assert json.loads(last)["error"]["code"] == 504
    await wait_for(lambda: cluster.pd.calls[0].closed_at, "the PD is told", 2)
    (trace,) = await cluster.proxy.traces(1)
    assert trace.outcome == "upstream_error"


async def test_a_pd_silent_within_a_whole_answer_is_a_504(clusters: Clusters) -> None:
    cluster = await clusters.get(
        "--stream-idle-timeout", "0.5", "--first-byte-timeout", "0.6", "--encode-timeout", "0.4"
    )

    async def silent(exchange: Exchange) -> None:
        await exchange.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
        await exchange.until_gone()

    cluster.pd.then(silent)
    (await cluster.proxy.chat(body_of("hi"))).error(504)
    await wait_for(lambda: cluster.pd.calls[0].closed_at, "the PD is told", 2)


async def test_a_pd_that_never_begins_is_a_504(clusters: Clusters) -> None:
    cluster = await clusters.get(
        "--stream-idle-timeout", "0.5", "--first-byte-timeout", "0.6", "--encode-timeout", "0.4"
    )
    cluster.pd.always(hang)
    for streamed in (False, True):
        (await cluster.proxy.chat(body_of("hi", stream=streamed))).error(504)
    await wait_for(lambda: all(seen.closed_at for seen in cluster.pd.calls), "the PD is told", 2)


async def test_limits_are_shown(clusters: Clusters) -> None:
    cluster = await clusters.get("--encode-timeout", "0.4", "--eject-after", "1000")
    shown = json.dumps((await cluster.proxy.admin("GET", "/admin/settings")).json())
    for name in (
        "connect_timeout",
        "encode_timeout",
        "first_byte_timeout",
        "stream_idle_timeout",
        "header_timeout",
        "body_timeout",
        "shutdown_grace",
    ):
        assert name in shown.replace("-", "_")


async def closed_by_proxy(reader: asyncio.StreamReader, within: float) -> bytes:
    """What came until the proxy closed."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), within)
    return b""


async def test_slow_clients_are_closed_and_others_are_served(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--header-timeout", "3", "--body-timeout", "4")
    base = max([(await cluster.proxy.chat(body_of(image(n)))).seconds for n in range(10)])
    start = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n".encode()
    half = (
        f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        "content-length: 5000000\r\n\r\n"
    ).encode() + b" " * 2_500_000
    slow = [await asyncio.open_connection("127.0.0.1", cluster.proxy.port) for _ in range(350)]
    for index, (_, writer) in enumerate(slow):
        writer.write(half if index % 7 == 0 else start if index % 7 < 6 else b"")
    dripping = [writer for index, (_, writer) in enumerate(slow) if 0 < index % 7 < 6]

    async def drip() -> None:
        while True:
            for writer in dripping:
                writer.write(b"x")
            await asyncio.sleep(0.3)

    dripper = asyncio.ensure_future(drip())
    times = []
    for n in range(20):
        reply = await cluster.proxy.chat(body_of(image(n)))
        assert reply.status == 200
        times.append(reply.seconds)
    assert sorted(times)[18] < max(2 * base, 1.0)
    answers = await asyncio.gather(*(closed_by_proxy(reader, 20) for reader, _ in slow))
    dripper.cancel()
    for answer in answers:
        assert answer == b"" or answer.split()[1] in {b"408", b"400"}, answer[:80]
    for _, writer in slow:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_idle_keep_alive_connections_do_not_pile_up_for_ever(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--header-timeout", "1", "--body-timeout", "1.5")
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.proxy.port)
    assert (await closed_by_proxy(reader, 10))[:12] in {b"", b"HTTP/1.1 408"}
    writer.close()
    await writer.wait_closed()


CROWD = 1000
FEW_FILES = ("sh", "-c", 'ulimit -n 1024; exec "$@"', "sh")


@pytest.mark.timeout(150)
async def test_a_crowd_beyond_capacity_is_told_so_and_leaves_nothing(clusters: Clusters) -> None:
    # The fakes' and the clients' ends are descriptors of this process, and keep its loop from answering.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        cluster = await clusters.fresh(
            *("--queue-timeout", "60", "--probe-timeout", "20", "--pd-probe-timeout", "20"),
            under=FEW_FILES,
        )
        body = body_of(image(1), stream=True)
        for _ in range(2):
            go = asyncio.Event()
            cluster.pd.always(after(go, stream()))
            crowd = [asyncio.ensure_future(cluster.proxy.chat(body, within=100)) for _ in range(CROWD)]
            await wait_for(lambda: sum(t.done() for t in crowd) > CROWD // 3, "the surplus is told", 60)  # noqa: B023
            assert not any(task.result().status == 200 for task in crowd if task.done())
            go.set()
            replies = await asyncio.gather(*crowd)
            good = [reply for reply in replies if reply.status == 200]
            assert len(good) >= 200
            assert all(reply.body.endswith(DONE) and not reply.broken for reply in good)
            for reply in replies:
                if reply.status != 200:
                    assert reply.error(429, 503)["code"] == "busy"
                    assert int(reply.headers["retry-after"]) >= 0
            await cluster.idle(20)
        # What had no descriptor to ask with says nothing of who was not asked.
        assert [(e.state, e.errors) for e in (await cluster.proxy.state()).encoders] == [("ready", 0)] * 2
        assert "max_inflight is" in cluster.proxy.log
        again = await asyncio.gather(*(cluster.proxy.chat(body) for _ in range(50)))
        assert {reply.status for reply in again} == {200}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_a_descriptor_nobody_is_blamed(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--eject-after", "1")
    pid = cluster.proxy.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.proxy.port)
    writer.write(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
    assert b"true" in await asyncio.wait_for(reader.readuntil(b"}"), 10), "it is accepted"
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    try:
        body = body_of(image(1))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert b" 503 " in answer.splitlines()[0], answer
        assert b"retry-after:" in answer.lower()
        later, asks = await asyncio.open_connection("127.0.0.1", cluster.proxy.port)
        asks.write(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
        # Many rounds of probes that cannot be sent, and of a client that cannot be let in.
        over = time.monotonic() + 1.5
        while time.monotonic() < over:
            await asyncio.sleep(0.05)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        writer.close()
        await writer.wait_closed()
    assert b"true" in await asyncio.wait_for(later.readuntil(b"}"), 10), "it had to wait, no more"
    asks.close()
    assert cluster.proxy.log.count("have to wait") == 1
    state = await cluster.proxy.state()
    assert [(e.state, e.errors) for e in state.encoders] == [("ready", 0)] * 2
    assert state.pds[0].state == "ready"
    assert (await cluster.proxy.chat(body)).status == 200


async def test_more_connections_than_the_cap_are_told_so(clusters: Clusters) -> None:
    cluster = await clusters.get("--max-connections", "5")
    held = [await asyncio.open_connection("127.0.0.1", cluster.proxy.port) for _ in range(5)]
    for body in (body_of("hi"), body_of("x" * 300_000)):
        reply = await cluster.proxy.chat(body)
        assert reply.error(503)["code"] == "busy"
        assert int(reply.headers["retry-after"]) >= 0
        assert reply.headers["connection"] == "close"
    silent, mute = await asyncio.open_connection("127.0.0.1", cluster.proxy.port)
    assert b" 503 " in (await asyncio.wait_for(silent.read(), 5)).splitlines()[0]
    for _, writer in (*held, (silent, mute)):
        writer.close()
        await writer.wait_closed()

    async def served() -> bool:
        return (await cluster.proxy.chat(body_of("hi"))).status == 200

    await eventually(served, "room again", 5)
    assert len(cluster.pd.calls) == 1


async def test_the_descriptor_limit_is_raised(clusters: Clusters) -> None:
    cluster = await clusters.get()
    limits = resource.prlimit(cluster.proxy.process.pid, resource.RLIMIT_NOFILE)
    assert limits[0] == limits[1]


async def endless(exchange: Exchange) -> None:
    """A stream that goes on until the peer leaves."""
    await exchange.start()
    while True:
        await exchange.chunk(event("t"))
        await asyncio.sleep(0.02)


async def test_sigterm_drains_then_ends_streams_at_the_grace_limit(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--drain-delay", "0.5", "--shutdown-grace", "1")
    cluster.pd.always(endless)
    cluster.encoders[0].always(hang)
    streaming = asyncio.ensure_future(cluster.proxy.chat(body_of("hi", stream=True)))
    await wait_for(lambda: cluster.pd.calls, "the stream is open")
    at = time.monotonic()
    cluster.proxy.signal(signal.SIGTERM)

    async def draining() -> bool:
        return (await cluster.proxy.get("/health")).status == 503

    await eventually(draining, "health says draining", 0.5)
    assert (await cluster.proxy.get("/readyz")).status == 503
    assert (await cluster.proxy.get("/livez")).status == 200
    assert "drain" in (await cluster.proxy.get("/readyz")).body.decode().lower()
    reply = await streaming
    assert reply.broken
    assert b"[DONE]" not in reply.body
    assert json.loads(reply.events[-1])["error"]["message"]
    assert await cluster.proxy.exited() == 0
    assert 1.0 < time.monotonic() - at < 5.0
    await wait_for(lambda: not any(fake.connections for fake in cluster.fakes), "upstream sockets closed")


async def test_a_short_stream_ends_well_during_shutdown(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--drain-delay", "0.1", "--shutdown-grace", "10")
    go = asyncio.Event()
    cluster.pd.always(after(go, stream()))
    asked = [asyncio.ensure_future(cluster.proxy.chat(body_of(image(n), stream=n == 1))) for n in range(3)]
    await wait_for(lambda: len(cluster.pd.calls) == 3, "three at the PD")
    cluster.proxy.signal(signal.SIGTERM)

    async def refused() -> bool:
        try:
            await cluster.proxy.get("/livez")
        except OSError:
            return True
        return False

    await eventually(refused, "the listener is closed", 5)
    at = time.monotonic()
    go.set()
    replies = await asyncio.gather(*asked)
    assert all(reply.status == 200 and not reply.broken for reply in replies)
    assert await cluster.proxy.exited() == 0
    assert time.monotonic() - at < 3, "it ends when the last stream ends"


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_at_once(clusters: Clusters, first: signal.Signals) -> None:
    cluster = await clusters.fresh("--drain-delay", "5", "--shutdown-grace", "60")
    cluster.pd.always(endless)
    streaming = asyncio.ensure_future(cluster.proxy.chat(body_of("hi", stream=True)))
    await wait_for(lambda: cluster.pd.calls, "the stream is open")
    cluster.proxy.signal(first)

    async def draining() -> bool:
        return (await cluster.proxy.get("/readyz")).status == 503

    await eventually(draining, "draining", 2)
    at = time.monotonic()
    cluster.proxy.signal(first)
    await cluster.proxy.exited(3)
    assert time.monotonic() - at < 2
    reply = await streaming
    assert reply.broken
    assert b"[DONE]" not in reply.body
    await wait_for(lambda: not any(fake.connections for fake in cluster.fakes), "upstream sockets closed")


async def test_an_idle_proxy_ends_soon_after_the_drain_delay(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--drain-delay", "0")
    at = time.monotonic()
    cluster.proxy.signal(signal.SIGTERM)
    assert await cluster.proxy.exited() == 0
    assert time.monotonic() - at < 3
    assert not cluster.proxy.admin_socket.exists(), "its socket is removed"

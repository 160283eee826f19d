"""The admin listener: members and their states, drain with its flush, identities, codes, events."""

import asyncio
import contextlib
import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from eccon_proxy.schema import EncoderInfo, ProxyState, Trace
from tests.fakes import hang
from tests.proxy.conftest import Clusters
from tests.proxy.support import (
    Cluster,
    Proxy,
    Reply,
    body_of,
    eventually,
    free_port,
    image,
    text,
    wait_for,
)
from tests.proxy.upstreams import Encoder, after, stream


async def members(cluster: Cluster) -> dict[str, EncoderInfo]:
    """The pool by id."""
    answer = await cluster.proxy.admin("GET", "/admin/encoders")
    assert answer.status == 200
    listed = msgspec.json.decode(answer.body, type=dict[str, list[EncoderInfo]])["encoders"]
    return {member.id: member for member in listed}


async def reaches(cluster: Cluster, encoder_id: str, state: str, within: float = 5.0) -> None:
    """Wait until a member is in a state."""

    async def there() -> bool:
        member = (await members(cluster)).get(encoder_id)
        return member is not None and member.state == state

    await eventually(there, f"{encoder_id} is {state}", within)


async def test_the_list_names_ids_urls_states(cluster: Cluster) -> None:
    listed = await members(cluster)
    assert list(listed) == ["encoder-0", "encoder-1"]
    assert [m.url for m in listed.values()] == [e.url for e in cluster.encoders]
    assert {m.state for m in listed.values()} == {"ready"}
    raw = (await cluster.proxy.admin("GET", "/admin/encoders")).json()["encoders"][0]
    assert {"id", "url", "state", "inflight", "staged"} <= raw.keys()


async def test_counts_follow_what_happens(cluster: Cluster) -> None:
    before = await members(cluster)
    for n in range(4):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    now = await members(cluster)
    assert sum(m.items for m in now.values()) - sum(m.items for m in before.values()) == 4
    go = asyncio.Event()
    cluster.pd.always(after(go, stream()))
    cluster.encoders[0].always(hang)
    waiting = [asyncio.ensure_future(cluster.proxy.chat(body_of(image(n), stream=True))) for n in range(2)]
    await wait_for(lambda: cluster.encodes == 6 and cluster.pd.calls[4:], "one encodes, one is at the PD")

    async def counted() -> bool:
        now = await members(cluster)
        return (now["encoder-0"].inflight, now["encoder-1"].staged) == (1, 1)

    await eventually(counted, "one in flight, one staged")
    cluster.encoders[0].drop(abort=True)
    go.set()
    await asyncio.gather(*waiting)

    async def consumed() -> bool:
        return all(m.staged == 0 for m in (await members(cluster)).values())

    await eventually(consumed, "nothing staged after the first byte")


@contextlib.asynccontextmanager
async def another(cluster: Cluster, name: str = "late") -> AsyncIterator[Encoder]:
    """One more encoder, not a member yet."""
    encoder = Encoder(name, cluster.ledger, cluster.pd)
    await encoder.start()
    try:
        yield encoder
    finally:
        await encoder.stop()


async def test_a_new_member_is_probed_then_used(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    async with another(cluster) as late:
        late.anything = hang
        answer = await cluster.proxy.admin("POST", "/admin/encoders", {"url": late.url})
        assert answer.status == 201
        member = msgspec.json.decode(answer.body, type=EncoderInfo)
        assert member.id == "encoder-2"
        assert member.url == late.url
        assert member.state == "probing"
        for n in range(3):
            assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
        assert not late.encodes
        late.anything = None
        late.drop()
        await reaches(cluster, "encoder-2", "ready", 10)
        for n in range(6):
            assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
        assert len(late.encodes) == 2
        assert (await cluster.proxy.admin("DELETE", "/admin/encoders/encoder-2")).status == 200
        assert "encoder-2" not in await members(cluster)
        for n in range(3):
            assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
        assert len(late.encodes) == 2


async def test_a_chosen_id(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    async with another(cluster) as late:
        answer = await cluster.proxy.admin("POST", "/admin/encoders", {"url": late.url, "id": "gpu-7.a"})
        assert answer.status == 201
        await reaches(cluster, "gpu-7.a", "ready")
        taken = await cluster.proxy.admin(
            "POST", "/admin/encoders", {"url": "http://127.0.0.1:9", "id": "gpu-7.a"}
        )
        taken.error(409)
        for bad in ("", "a/b", "a b", "x" * 300, 7, "a\nb"):
            url = f"http://127.0.0.1:{free_port()}"
            (await cluster.proxy.admin("POST", "/admin/encoders", {"url": url, "id": bad})).error(400, 422)
        assert (await cluster.proxy.admin("DELETE", "/admin/encoders/gpu-7.a?now=true")).status == 200


async def test_duplicates_are_409_however_written(cluster: Cluster) -> None:
    port = cluster.encoders[0].port
    for url in (
        f"http://127.0.0.1:{port}",
        f"http://localhost:{port}",
        f"http://127.0.0.1:{port}/",
        f"HTTP://LocalHost:{port}",
        f"http://127.1:{port}",
        f"http://0x7f000001:{port}",
        f"http://0.0.0.0:{port}",
        f"http://[::ffff:127.0.0.1]:{port}",
        f"http://127.0.0.1.:{port}/",
    ):
        (await cluster.proxy.admin("POST", "/admin/encoders", {"url": url})).error(409)
    assert len(await members(cluster)) == 2


async def test_itself_the_pd_and_other_schemes_are_422(cluster: Cluster) -> None:
    for url in (
        cluster.proxy.url,
        f"http://localhost:{cluster.proxy.port}",
        f"http://0.0.0.0:{cluster.proxy.port}",
        "ftp://127.0.0.1:21",
        "127.0.0.1:80",
        "file:///etc/passwd",
        "http://",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://user:pw@127.0.0.1:1",
        "http://[::1",
        "http://127.0.0.1:1/\ud55c",
        "http://127.0.0.1:1/a b",
        "",
        "x",
    ):
        (await cluster.proxy.admin("POST", "/admin/encoders", {"url": url})).error(422)
    bodies: list[object] = [{}, {"url": None}, {"url": 7}, {"url": ["http://127.0.0.1:1"]}, [], "x", None]
    for body in bodies:
        (await cluster.proxy.admin("POST", "/admin/encoders", body)).error(400, 422)
    (await cluster.proxy.admin("POST", "/admin/encoders", {"url": cluster.pd.url})).error(409, 422)
    assert len(await members(cluster)) == 2


async def test_unknown_ids_are_404(cluster: Cluster) -> None:
    for method, path in (
        ("POST", "/admin/encoders/nope/drain"),
        ("POST", "/admin/encoders/nope/resume"),
        ("DELETE", "/admin/encoders/nope"),
        ("GET", "/admin/traces/nope"),
        ("GET", "/admin/nope"),
    ):
        error = (await cluster.proxy.admin(method, path)).error(404)
        assert error["message"] in {"no encoder 'nope'", "no trace 'nope'", "Not Found: /admin/nope"}


async def test_the_last_one_goes_only_by_force(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    assert (await cluster.proxy.admin("DELETE", "/admin/encoders/encoder-0")).status == 200
    (await cluster.proxy.admin("DELETE", "/admin/encoders/encoder-1")).error(409, 422)
    assert (await cluster.proxy.chat(body_of(image(1)))).status == 200
    assert (await cluster.proxy.admin("DELETE", "/admin/encoders/encoder-1?force=true")).status == 200
    (await cluster.proxy.chat(body_of(image(1)))).error(503)
    assert (await cluster.proxy.chat(body_of(text()))).status == 200
    answer = await cluster.proxy.admin("POST", "/admin/encoders", {"url": cluster.encoders[0].url})
    assert answer.status == 201
    await cluster.ready()
    assert (await cluster.proxy.chat(body_of(image(1)))).status == 200


async def test_the_last_one_that_stays_goes_only_by_force(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    go = asyncio.Event()
    leaving = cluster.encoders[0]
    leaving.always(after(go, leaving.chat))
    asked = [asyncio.ensure_future(cluster.proxy.chat(body_of(image(n)))) for n in range(2)]
    await wait_for(lambda: leaving.encodes, "one is busy")
    assert (await cluster.proxy.admin("DELETE", "/admin/encoders/encoder-0")).status == 200
    assert "encoder-0" in await members(cluster), "it is drained first"
    (await cluster.proxy.admin("DELETE", "/admin/encoders/encoder-1")).error(409)
    go.set()
    await asyncio.gather(*asked)


async def test_drain_waits_for_flight_and_stage_then_flushes(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    encoding, answering = asyncio.Event(), asyncio.Event()
    draining = cluster.encoders[0]
    draining.always(after(encoding, draining.chat))
    # Two images: one at each encoder; the request waits for the slow one.
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1), image(2), stream=True)))
    await wait_for(lambda: cluster.encodes == 2, "both at their encoders")
    accepted = await cluster.proxy.admin("POST", "/admin/encoders/encoder-0/drain")
    assert accepted.status == 200
    assert accepted.json()["state"] == "draining"
    for n in range(4):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    assert len(draining.encodes) == 1, "no new picks"
    assert (await members(cluster))["encoder-0"].state == "draining"
    assert (await members(cluster))["encoder-0"].reason, "it says what it waits for"
    flushes = len(cluster.pd.own)
    cluster.pd.then(after(answering, stream()))
    encoding.set()
    await wait_for(lambda: len(cluster.pd.calls) == 5, "the request is at the PD", 10)
    (primed,) = [media["uuid"] for media in cluster.pd.calls[4].json()["messages"][0]["content"][:1]]
    assert primed
    if draining.name in {s.encoder for s in cluster.ledger.staged[primed]}:
        assert (await members(cluster))["encoder-0"].state == "draining", "its item is not consumed yet"
    answering.set()
    assert (await asked).status == 200
    await reaches(cluster, "encoder-0", "drained")
    assert len(cluster.pd.own) > flushes, "the flush: a one-token text request at the PD"
    flush = cluster.pd.own[-1].json()
    assert flush["max_tokens"] == 1
    assert "image" not in json.dumps(flush)
    drained = (await members(cluster))["encoder-0"]
    assert (drained.inflight, drained.staged) == (0, 0)
    await draining.stop(abort=True)
    for n in range(4):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    await draining.start()
    assert (await cluster.proxy.admin("POST", "/admin/encoders/encoder-0/resume")).status == 200
    await reaches(cluster, "encoder-0", "ready", 10)
    before = len(draining.encodes)
    for n in range(4):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    assert len(draining.encodes) == before + 2


async def test_drain_now_moves_a_hanging_encoders_items(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    hung = cluster.encoders[0]
    hung.always(hang)
    asked = [asyncio.ensure_future(cluster.proxy.chat(body_of(image(n)))) for n in range(4)]
    await wait_for(lambda: len(hung.encodes) == 2, "two hang")
    assert (await cluster.proxy.admin("POST", "/admin/encoders/encoder-0/drain?now=true")).status == 200
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
    await wait_for(lambda: all(seen.closed_at for seen in hung.encodes), "the hung ones are aborted", 2)
    await reaches(cluster, "encoder-0", "drained")
    uuids = [s.json()["messages"][0]["content"][0]["uuid"] for e in cluster.encoders for s in e.encodes]
    assert len(set(uuids)) == len(uuids)


async def test_drain_of_a_hanging_encoder_ends_too(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--encode-timeout", "1", "--eject-after", "1000")
    hung = cluster.encoders[0]
    hung.always(hang)
    asked = [asyncio.ensure_future(cluster.proxy.chat(body_of(image(n)))) for n in range(2)]
    await wait_for(lambda: len(hung.encodes) == 1, "one hangs")
    assert (await cluster.proxy.admin("POST", "/admin/encoders/encoder-0/drain")).status == 200
    await reaches(cluster, "encoder-0", "drained", 10)
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}


async def test_an_idle_encoder_is_drained_with_a_flush(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    before = len(cluster.pd.own)
    assert (await cluster.proxy.admin("POST", "/admin/encoders/encoder-1/drain")).status == 200
    await reaches(cluster, "encoder-1", "drained")
    # Nothing is known of the time before the proxy started: it counts as staged until a flush.
    assert len(cluster.pd.own) > before
    assert (await cluster.proxy.admin("POST", "/admin/encoders/encoder-1/drain")).status in {200, 409}
    assert (await cluster.proxy.admin("POST", "/admin/encoders/encoder-1/resume")).status == 200
    await cluster.ready()


async def test_drain_with_the_pd_down_does_not_hang(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    await cluster.pd.die()

    async def down() -> bool:
        return (await cluster.proxy.state()).pds[0].state == "down"

    await eventually(down, "the PD is down", 5)
    assert (await cluster.proxy.admin("POST", "/admin/encoders/encoder-0/drain")).status == 200
    # With no PD there is no queue that could hold a message of it.
    await reaches(cluster, "encoder-0", "drained")


async def test_removal_with_work_in_flight_drains_first(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    go = asyncio.Event()
    going = cluster.encoders[0]
    going.always(after(go, going.chat))
    asked = [asyncio.ensure_future(cluster.proxy.chat(body_of(image(n)))) for n in range(2)]
    await wait_for(lambda: len(going.encodes) == 1, "one in flight")
    removing = asyncio.ensure_future(cluster.proxy.admin("DELETE", "/admin/encoders/encoder-0"))
    await reaches(cluster, "encoder-0", "draining")
    go.set()
    assert (await removing).status == 200
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}

    async def gone() -> bool:
        return "encoder-0" not in await members(cluster)

    await eventually(gone, "removed after the drain")
    assert len(going.encodes) == 1


async def test_traces_newest_first_and_in_flight_ones_included(cluster: Cluster) -> None:
    for n in range(3):
        await cluster.proxy.chat(body_of(image(n), image(n + 10)), {"x-request-id": f"order-{n}"})
    go = asyncio.Event()
    cluster.pd.then(after(go, stream()))
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of("x", stream=True), {"x-request-id": "order-3"}))
    await wait_for(lambda: len(cluster.pd.calls) == 4, "one in flight")
    traces = await cluster.proxy.traces(4)
    assert [trace.id for trace in traces] == ["order-3", "order-2", "order-1", "order-0"]
    assert traces[0].status == 0
    go.set()
    await asked
    done = traces[1]
    assert (done.status, done.outcome, done.items, done.model) == (200, "ok", 2, "m")
    assert done.total_s is not None
    assert done.ttft_s is None or done.ttft_s <= done.total_s
    kinds = [span.kind for span in done.spans]
    assert kinds.count("encode") == 2
    assert "pd" in kinds
    for span in done.spans:
        assert span.end is not None
        assert 0 <= span.start <= span.end <= done.total_s + 0.01
    assert {span.encoder for span in done.spans if span.kind == "encode"} == {"encoder-0", "encoder-1"}
    assert (await cluster.proxy.trace("order-2")).id == "order-2"
    for limit in ("0", "-1", "x"):
        assert (await cluster.proxy.admin("GET", f"/admin/traces?limit={limit}")).status in {200, 400, 422}


class Feed:
    """The event stream of the admin listener."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._lines = response.content

    async def next(self, within: float = 5.0) -> tuple[int, str, Any]:
        """The next event: id, name, data."""
        fields: dict[str, str] = {}
        while True:
            line = (await asyncio.wait_for(self._lines.readline(), within)).decode().rstrip("\r\n")
            if line.startswith(":"):
                continue
            if not line and "event" in fields:
                return int(fields["id"]), fields["event"], json.loads(fields["data"])
            name, _, value = line.partition(": ")
            fields[name] = value

    async def until(self, name: str, within: float = 5.0) -> tuple[int, Any]:
        """The next event of a name."""
        while True:
            seq, event, data = await self.next(within)
            if event == name:
                return seq, data


@contextlib.asynccontextmanager
async def events(proxy: Proxy, last: int | None = None) -> AsyncIterator[Feed]:
    """Follow the events, from one that was seen before if `last` is given."""
    connector = aiohttp.UnixConnector(str(proxy.admin_socket), force_close=True)
    headers = {"last-event-id": str(last)} if last is not None else {}
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get("http://admin/admin/events", headers=headers) as response,
    ):
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Feed(response)


async def test_events_begin_with_the_state_and_tell_each_trace(cluster: Cluster) -> None:
    async with events(cluster.proxy) as feed:
        seq, name, data = await feed.next()
        assert name == "state"
        state = msgspec.convert(data, ProxyState)
        assert len(state.encoders) == 2
        await cluster.proxy.chat(body_of(image(1)), {"x-request-id": "told"})
        told: list[Trace] = []
        last = seq
        while not told or told[-1].status == 0:
            seq, data = await feed.until("trace")
            assert seq > last
            last = seq
            told.append(msgspec.convert(data, Trace))
        assert {trace.id for trace in told} == {"told"}
        assert told[0].status == 0
        assert told[-1].status == 200
        assert len(told) >= 3, "at its start, when all is encoded, at its end"


async def test_events_resume_where_they_were_left(cluster: Cluster) -> None:
    async with events(cluster.proxy) as feed:
        await feed.until("state")
        await cluster.proxy.chat(body_of("x"), {"x-request-id": "before"})
        seq, _ = await feed.until("trace")
    await cluster.proxy.chat(body_of("x"), {"x-request-id": "while-away"})
    async with events(cluster.proxy, seq) as feed:
        ids = []
        while "while-away" not in ids:
            next_seq, name, data = await feed.next()
            assert name != "state", "what was missed is told, not all anew"
            assert next_seq > seq
            if name == "trace":
                ids.append(data["id"])
    async with events(cluster.proxy, 10**9) as feed:
        assert (await feed.next())[1] == "state", "an id that never was: all anew"


async def test_events_tell_of_encoders_and_pd(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    async with events(cluster.proxy) as feed:
        await feed.until("state")
        await cluster.encoders[0].stop(abort=True)
        _, told = await feed.until("encoder")
        member = msgspec.convert(told, EncoderInfo)
        assert member.id in {"encoder-0", "encoder-1"}
        await cluster.pd.die()
        while True:
            _, told = await feed.until("pd")
            if told["state"] == "down":
                break


async def test_many_followers_that_do_not_read(cluster: Cluster) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(10):
            await stack.enter_async_context(events(cluster.proxy))
        for n in range(30):
            assert (await cluster.proxy.chat(body_of(image(n)))).status == 200


async def test_the_socket_is_private(cluster: Cluster) -> None:
    mode = cluster.proxy.admin_socket.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


async def test_the_default_socket_is_in_the_state_directory(clusters: Clusters, tmp_path: Path) -> None:
    cluster = await clusters.get()
    port = free_port()
    proxy = await _start_plain(tmp_path, port, cluster, {"XDG_STATE_HOME": str(tmp_path)})
    where = tmp_path / "eccon" / f"proxy-{port}" / "admin.sock"
    if len(str(where)) <= 107:
        assert stat.S_IMODE(where.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(where.stat().st_mode) == 0o600
        assert (await cluster.proxy.admin("GET", "/admin/state")).status == 200
    await proxy.stop()


async def _start_plain(tmp_path: Path, port: int, cluster: Cluster, env: dict[str, str]) -> Proxy:
    """A proxy with nothing but the guide's flags."""
    proxy = await Proxy.start(
        tmp_path,
        *("--encode-servers-urls", ",".join(e.url for e in cluster.encoders)),
        *("--decode-servers-urls", cluster.pd.url),
        env=env,
        port=port,
        admin=False,
    )

    async def alive() -> bool:
        assert proxy.process.returncode is None, proxy.log
        try:
            return (await proxy.get("/livez")).status == 200
        except OSError:
            return False

    await eventually(alive, "it answers", 20)
    return proxy


async def test_admin_on_a_port_answers_there_only(clusters: Clusters, tmp_path: Path) -> None:
    cluster = await clusters.get()
    port, admin_port = free_port(), free_port()
    proxy = await Proxy.start(
        tmp_path,
        *("--encode-servers-urls", cluster.encoders[0].url, "--decode-servers-urls", cluster.pd.url),
        *("--admin", f"127.0.0.1:{admin_port}"),
        port=port,
        admin=False,
    )

    async def ask(where: int, **headers: str) -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{where}/admin/state", headers=headers) as response,
        ):
            await response.read()
            return response.status

    async def alive() -> bool:
        try:
            return await ask(admin_port) == 200
        except OSError:
            return False

    await eventually(alive, "the admin port answers", 20)
    assert await ask(port) == 404
    assert await ask(admin_port, host=f"localhost:{admin_port}") == 200
    # What a page in the operator's browser could send, and after its name was made to resolve to us.
    assert await ask(admin_port, origin="http://evil.example") == 403
    assert await ask(admin_port, host=f"evil.example:{admin_port}") == 403
    assert await ask(admin_port, host="127.0.0.1.evil.example") == 403
    await proxy.stop()


async def test_settings_mask_secrets(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--api-key", "sk-hidden", "--upstream-api-key", "sk-too")
    answer = await cluster.proxy.admin("GET", "/admin/settings")
    assert answer.status == 200
    assert b"sk-" not in answer.body
    assert cluster.pd.url.encode() in answer.body


@pytest.mark.parametrize("verb", ["start_profile", "stop_profile"])
async def test_profiling_goes_to_all(cluster: Cluster, verb: str) -> None:
    async def done(exchange: Any) -> None:
        await exchange.answer(200, b"", ())

    for fake in cluster.fakes:
        fake.always(done, f"/{verb}")
    answers: list[Reply] = [
        await cluster.proxy.admin("POST", path) for path in (f"/admin/{verb}", f"/{verb}")
    ]
    assert 200 in {answer.status for answer in answers}
    assert all(fake.requests(f"/{verb}") for fake in cluster.fakes)


async def test_a_long_name_is_not_kept_at_its_length(cluster: Cluster) -> None:
    long = "n" * 2_000_000
    reply = await cluster.proxy.chat(body_of(image(1, uuid=long), model=long), {"x-request-id": "long-name"})
    assert reply.status == 200
    assert len((await cluster.proxy.admin("GET", "/admin/traces/long-name")).body) < 10_000
    assert len(cluster.proxy.log) < 100_000


async def test_the_admin_shows_no_media(cluster: Cluster) -> None:
    part = image("precious")
    await cluster.proxy.chat(body_of(part), {"x-request-id": "media"})
    shown = (await cluster.proxy.admin("GET", "/admin/traces/media")).body
    assert part["image_url"]["url"].encode()[-40:] not in shown
    assert part["image_url"]["url"][-40:] not in cluster.proxy.log

"""The PD is precious: epochs, the gate, refusals while it is down, poison, stalls, groups."""

import asyncio
import json
import time

import pytest

from tests.fakes import Exchange, Handler, hang, reset, shut
from tests.proxy.classify import media_parts
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, Proxy, Reply, body_of, eventually, free_port, image, text, wait_for
from tests.proxy.upstreams import after, event, refuse, stream


async def pd_state(cluster: Cluster, index: int = 0) -> str:
    """State of one PD."""
    return (await cluster.proxy.state()).pds[index].state


async def pd_is(cluster: Cluster, state: str, within: float = 5.0) -> None:
    """Wait for a state of the PD."""

    async def there() -> bool:
        return await pd_state(cluster) == state

    await eventually(there, f"the PD is {state}", within)


async def test_the_epoch_is_the_pds_start_time(clusters: Clusters) -> None:
    cluster = await clusters.get()
    assert (await cluster.proxy.state()).pds[0].epoch == cluster.pd.started_at
    await cluster.pd.die()
    await pd_is(cluster, "down")
    await cluster.pd.come_back()
    await pd_is(cluster, "ready", 10)
    assert (await cluster.proxy.state()).pds[0].epoch == cluster.pd.started_at


async def test_while_the_pd_is_down_nothing_is_encoded(clusters: Clusters) -> None:
    cluster = await clusters.get()
    await cluster.pd.die()
    await pd_is(cluster, "down")
    for streamed in (False, True):
        reply = await cluster.proxy.chat(body_of(image(1), stream=streamed))
        reply.error(503)
        assert int(reply.headers["retry-after"]) > 0
        assert reply.seconds < 0.5
    assert cluster.encodes == 0
    down = reply.error(503)["code"]
    await cluster.pd.come_back()
    await pd_is(cluster, "ready", 10)
    assert (await cluster.proxy.chat(body_of(image(1)))).status == 200
    assert down is not None, "down and busy are told apart by their code"


async def test_a_new_life_voids_what_was_staged(clusters: Clusters) -> None:
    cluster = await clusters.get()
    slow = cluster.encoders[1]
    release = asyncio.Event()
    slow.then(after(release, slow.chat))
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image("a"), image("b"))))
    await wait_for(lambda: cluster.encodes == 2, "both placed")
    await wait_for(lambda: cluster.encoders[0].encodes[0].done_at, "one is staged")
    ended = (await cluster.proxy.metrics())["eccon_proxy_pd_epochs_total"]
    await cluster.pd.die()
    await cluster.pd.come_back()

    # No PD is back within one interval of the probes, as this one is.
    async def noticed() -> bool:
        return (await cluster.proxy.metrics())["eccon_proxy_pd_epochs_total"] > ended

    await eventually(noticed, "another life is noticed")
    release.set()
    reply = await asked
    # Encoded anew for the new life, or refused; never passed on with what the old one held.
    assert reply.status in {200, 503}
    await cluster.ready(10)
    assert (await cluster.proxy.chat(body_of(image("a")))).status == 200


async def test_a_restart_between_probes_is_seen_before_the_forward(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--pd-probe-interval", "60", "--pd-probe-timeout", "2")
    slow = cluster.encoders[0]
    release = asyncio.Event()
    slow.then(after(release, slow.chat))
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image("a"), image("b"))))
    await wait_for(lambda: cluster.encodes == 2, "both placed")
    await cluster.pd.die()
    await cluster.pd.come_back()
    release.set()
    reply = await asked
    assert reply.status in {200, 503}
    assert not cluster.ledger.violations


async def test_a_start_time_alone_makes_a_new_life(clusters: Clusters) -> None:
    cluster = await clusters.get()
    slow = cluster.encoders[0]
    release = asyncio.Event()
    slow.then(after(release, slow.chat))
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image("a"), image("b"))))
    await wait_for(lambda: cluster.encodes == 2, "both placed")
    # As behind a load balancer or after a very quick restart: no connection was refused.
    cluster.pd.started_at += 50

    async def seen() -> bool:
        return (await cluster.proxy.state()).pds[0].epoch == cluster.pd.started_at

    await eventually(seen, "the new life is seen", 5)
    release.set()
    assert (await asked).status in {200, 503}


async def test_one_reset_makes_it_suspect_only(clusters: Clusters) -> None:
    cluster = await clusters.get()
    cluster.pd.then(reset, reset)
    (await cluster.proxy.chat(body_of("hi"))).error(502, 503)
    await pd_is(cluster, "ready", 3)
    assert (await cluster.proxy.chat(body_of(image(1)))).status == 200


async def test_idle_connections_that_close_are_no_death(clusters: Clusters) -> None:
    cluster = await clusters.get()
    for _ in range(5):
        assert (await cluster.proxy.chat(body_of(image(1)))).status == 200
        cluster.pd.drop()
        assert await pd_state(cluster) == "ready"
        reply = await cluster.proxy.chat(body_of(image(2)))
        assert reply.status == 200, reply.body


async def test_a_reused_connection_that_dies_is_tried_once_more(clusters: Clusters) -> None:
    cluster = await clusters.get()
    for streamed in (False, True):
        assert (await cluster.proxy.chat(body_of("warm"))).status == 200
        before = len(cluster.pd.calls)
        cluster.pd.then(shut)
        assert (await cluster.proxy.chat(body_of("hi", stream=streamed))).status == 200
        assert len(cluster.pd.calls) == before + 2


async def test_a_request_that_got_a_byte_is_never_replayed(clusters: Clusters) -> None:
    cluster = await clusters.get()

    async def one_byte(exchange: Exchange) -> None:
        await exchange.send(b"H")
        exchange.close()

    for streamed in (False, True):
        assert (await cluster.proxy.chat(body_of("warm"))).status == 200
        before = len(cluster.pd.calls)
        cluster.pd.then(one_byte)
        (await cluster.proxy.chat(body_of("hi", stream=streamed))).error(502, 503)
        assert len(cluster.pd.calls) == before + 1


async def deadly(cluster: Cluster, body: bytes) -> Reply:
    """A request during which the PD dies."""
    dying = asyncio.Event()

    async def dies(exchange: Exchange) -> None:
        dying.set()
        await exchange.until_gone()

    cluster.pd.then(dies)
    asked = asyncio.ensure_future(cluster.proxy.chat(body))
    await wait_for(dying.is_set, "at the PD")
    await cluster.pd.die()
    reply = await asked
    await pd_is(cluster, "down")
    await cluster.pd.come_back()
    await cluster.ready(15)
    return reply


async def test_a_request_in_two_deaths_is_poison(clusters: Clusters) -> None:
    cluster = await clusters.get()
    poison = body_of(image("poison"), text("die"))
    for _ in range(2):
        reply = await deadly(cluster, poison)
        reply.error(500, 502, 503)
    calls, encodes = len(cluster.pd.calls), cluster.encodes
    reply = await cluster.proxy.chat(poison)
    assert 400 <= reply.status < 500, "it is the request, not the server"
    assert reply.error(reply.status)["message"]
    assert (len(cluster.pd.calls), cluster.encodes) == (calls, encodes)
    assert (await cluster.proxy.chat(body_of(image("fine"), text("die")))).status == 200


async def test_one_death_is_no_proof(clusters: Clusters) -> None:
    cluster = await clusters.get()
    body = body_of(image("suspect"))
    await deadly(cluster, body)
    assert (await cluster.proxy.chat(body)).status == 200


async def test_an_announced_restart_is_held_against_nobody(clusters: Clusters) -> None:
    cluster = await clusters.get()
    body = body_of(image("bystander"), text("hi"))
    for _ in range(2):
        answer = await cluster.proxy.admin("POST", "/admin/pds/expect-restart", {"seconds": 60})
        assert answer.status == 200
        assert answer.json()["url"] == cluster.pd.url
        (await deadly(cluster, body)).error(500, 502, 503)
    assert (await cluster.proxy.chat(body)).status == 200
    await deadly(cluster, body)
    await deadly(cluster, body)
    assert (await cluster.proxy.chat(body)).error(400)["code"] == "poisoned_request", (
        "it was for one end only"
    )


async def test_a_restart_that_is_taken_back_excuses_nobody(clusters: Clusters) -> None:
    cluster = await clusters.get()
    body = body_of(image("culprit"))
    for _ in range(2):
        for seconds in (60, 0):
            await cluster.proxy.admin("POST", "/admin/pds/expect-restart", {"seconds": seconds})
        await deadly(cluster, body)
    assert (await cluster.proxy.chat(body)).status == 400


@pytest.mark.parametrize(
    "body", [{"seconds": -1}, {"seconds": "soon"}, {"url": "ftp://x"}, {"url": "http://127.0.0.1:1"}, [1]]
)
async def test_odd_announcements_are_refused(cluster: Cluster, body: object) -> None:
    (await cluster.proxy.admin("POST", "/admin/pds/expect-restart", body)).error(400, 422)


async def test_deaths_are_forgotten(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--poison-seconds", "0.2")
    body = body_of("hi")
    for _ in range(2):
        await deadly(cluster, body)

    async def served() -> bool:
        return (await cluster.proxy.chat(body)).status == 200

    await eventually(served, "what was long ago is forgotten", 5)


async def test_a_silence_is_no_death(clusters: Clusters) -> None:
    cluster = await clusters.get("--probe-timeout", "0.5", "--pd-probe-timeout", "0.5")
    body = body_of("patience")
    for _ in range(2):
        cluster.pd.then(hang)
        before = len(cluster.pd.calls)
        asked = asyncio.ensure_future(cluster.proxy.chat(body))
        await wait_for(lambda: len(cluster.pd.calls) > before, "in flight")  # noqa: B023
        cluster.pd.anything = hang
        await pd_is(cluster, "down", 10)
        cluster.pd.anything = None
        await pd_is(cluster, "ready", 10)
        asked.cancel()
    assert (await cluster.proxy.chat(body)).status == 200


async def test_another_process_after_a_silence_is_a_death(clusters: Clusters) -> None:
    cluster = await clusters.get("--probe-timeout", "0.5", "--pd-probe-timeout", "0.5")
    body = body_of("last words")
    for _ in range(2):
        cluster.pd.then(hang)
        before = len(cluster.pd.calls)
        asked = asyncio.ensure_future(cluster.proxy.chat(body))
        await wait_for(lambda: len(cluster.pd.calls) > before, "in flight")  # noqa: B023
        cluster.pd.anything = hang
        await pd_is(cluster, "down", 10)
        await cluster.pd.die()
        cluster.pd.anything = None
        await cluster.pd.come_back()
        await pd_is(cluster, "ready", 10)
        asked.cancel()
    (await cluster.proxy.chat(body)).error(400)


async def test_a_request_in_flight_at_a_death_is_not_replayed(clusters: Clusters) -> None:
    cluster = await clusters.get()
    (await deadly(cluster, body_of("once"))).error(500, 502, 503)
    assert len([call for call in cluster.pd.calls if b"once" in call.body]) == 1


async def test_a_stall_is_reported(clusters: Clusters) -> None:
    cluster = await clusters.fresh(
        "--probe-timeout", "0.5", "--pd-probe-timeout", "0.5", "--stall-after", "0.5"
    )
    cluster.pd.always(hang)
    cluster.pd.running = 1
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1), stream=True), within=60))
    await wait_for(lambda: cluster.pd.calls, "in flight")
    await pd_is(cluster, "stalled", 10)
    assert cluster.pd.own, "the canary was sent"
    assert all(seen.json()["max_tokens"] == 1 for seen in cluster.pd.own)
    samples = await cluster.proxy.metrics()
    assert any("stall" in key and value for key, value in samples.items())
    before = cluster.encodes
    (await cluster.proxy.chat(body_of(image(2)))).error(503)
    assert cluster.encodes == before, "nothing is encoded for a PD that stands still"
    cluster.pd.always(cluster.pd.chat)
    cluster.pd.drop()
    await asked
    await pd_is(cluster, "ready", 10)
    assert (await cluster.proxy.chat(body_of(image(1)))).status == 200


async def test_a_stall_outlives_the_clients_that_gave_up(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--stall-after", "0.5")
    go = asyncio.Event()
    cluster.pd.always(after(go, cluster.pd.chat))
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1), stream=True), within=60))
    await wait_for(lambda: cluster.pd.calls, "in flight")
    await pd_is(cluster, "stalled", 10)
    asked.cancel()
    await wait_for(lambda: cluster.pd.calls[0].closed_at, "the client is gone")
    probed = len(cluster.pd.requests("/health", "GET"))
    await wait_for(lambda: len(cluster.pd.requests("/health", "GET")) > probed + 3, "looked at again")
    assert await pd_state(cluster) == "stalled"
    (await cluster.proxy.chat(body_of(image(2)))).error(503)
    go.set()
    await pd_is(cluster, "ready", 10)


async def test_a_new_process_ends_a_stall(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--stall-after", "0.5")
    cluster.pd.always(hang)
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image(1)), within=60))
    await wait_for(lambda: cluster.pd.calls, "in flight")
    await pd_is(cluster, "stalled", 10)
    lives = (await cluster.proxy.metrics())["eccon_proxy_pd_epochs_total"]
    cluster.pd.started_at += 10
    cluster.pd.always(cluster.pd.chat)
    cluster.pd.drop()

    async def another() -> bool:
        return (await cluster.proxy.metrics())["eccon_proxy_pd_epochs_total"] > lives

    await eventually(another, "the new process is noticed")
    await pd_is(cluster, "ready", 10)
    await asked


async def test_a_full_pd_is_not_stalled(clusters: Clusters) -> None:
    cluster = await clusters.fresh(
        "--probe-timeout", "0.5", "--pd-probe-timeout", "0.5", "--stall-after", "0.4"
    )
    cluster.pd.always(hang)
    cluster.pd.running, cluster.pd.waiting = 8, 5
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of("hi", stream=True), within=60))
    await wait_for(lambda: cluster.pd.calls, "in flight")
    over = time.monotonic() + 2.5
    while time.monotonic() < over:
        cluster.pd.generated += 3
        assert await pd_state(cluster) == "ready"
        await asyncio.sleep(0.03)
    asked.cancel()


async def test_streams_that_flow_are_no_stall(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--stall-after", "0.4")

    async def slow(exchange: Exchange) -> None:
        await exchange.start()
        over = time.monotonic() + 1.5
        while time.monotonic() < over:
            await exchange.chunk(event("t"))
            await asyncio.sleep(0.05)
        await exchange.finish()

    cluster.pd.then(slow)
    assert not (await cluster.proxy.chat(body_of("hi", stream=True))).broken
    assert not cluster.pd.own, "no canary while tokens come"


async def test_an_outage_is_noticed_and_ended_by_itself(clusters: Clusters) -> None:
    cluster = await clusters.get()
    for _ in range(2):
        at = time.monotonic()
        await cluster.pd.die()
        await pd_is(cluster, "down")
        await cluster.pd.come_back()
        await pd_is(cluster, "ready", 10)
        assert time.monotonic() - at < 10


async def test_a_pd_that_freezes_is_not_ready(clusters: Clusters) -> None:
    cluster = await clusters.get("--probe-timeout", "0.5", "--pd-probe-timeout", "0.5")
    cluster.pd.anything = hang

    async def noticed() -> bool:
        return await pd_state(cluster) != "ready"

    await eventually(noticed, "the frozen PD is noticed", 10)
    assert (await cluster.proxy.get("/health")).seconds < 0.5
    cluster.pd.anything = None
    cluster.pd.drop()
    await pd_is(cluster, "ready", 10)


async def test_a_dead_engine_behind_a_live_port_is_down(clusters: Clusters) -> None:
    cluster = await clusters.get()
    cluster.pd.always(refuse(503, "EngineDeadError"), "/health", "GET")

    async def noticed() -> bool:
        return await pd_state(cluster) == "down"

    await eventually(noticed, "down", 5)
    (await cluster.proxy.chat(body_of(image(1)))).error(503)
    assert cluster.encodes == 0


@pytest.mark.parametrize("how", [refuse(404, "no metrics here"), shut, hang], ids=["404", "shut", "hang"])
async def test_metrics_that_fail_do_not_take_the_pd_down(clusters: Clusters, how: Handler) -> None:
    cluster = await clusters.get("--probe-timeout", "0.5", "--pd-probe-timeout", "0.5")
    cluster.pd.always(how, "/metrics", "GET")
    before = len(cluster.pd.requests("/metrics", "GET"))
    await wait_for(lambda: len(cluster.pd.requests("/metrics", "GET")) > before + 3, "probed on")
    assert await pd_state(cluster) == "ready"
    assert (await cluster.proxy.chat(body_of(image(1)))).status == 200


async def test_the_same_image_after_a_restart_has_a_new_identity(clusters: Clusters) -> None:
    cluster = await clusters.get()
    body = body_of(image(1))
    assert (await cluster.proxy.chat(body)).status == 200
    await cluster.pd.die()
    await pd_is(cluster, "down")
    await cluster.pd.come_back()
    await cluster.ready(10)
    assert (await cluster.proxy.chat(body)).status == 200
    one, two = (media_parts(call.json())[0].part["uuid"] for call in cluster.pd.calls)
    assert one != two
    assert cluster.encodes == 2


async def test_several_pds_need_groups(clusters: Clusters, tmp_path: object) -> None:
    cluster = await clusters.get()
    urls = f"http://127.0.0.1:{free_port()},{cluster.pd.url}"
    proxy = await Proxy.start(
        cluster.proxy.log_path.parent,
        *("--encode-servers-urls", cluster.encoders[0].url, "--decode-servers-urls", urls),
    )
    assert await proxy.exited(20) != 0
    assert "group" in proxy.log
    assert "Traceback" not in proxy.log


async def test_each_group_feeds_its_own_pd(clusters: Clusters) -> None:
    cluster = await clusters.fresh(encoders=4, pds=2)
    for n in range(12):
        assert (await cluster.proxy.chat(body_of(image(n), image(n + 100)))).status == 200
    assert all(len(pd.calls) >= 3 for pd in cluster.pds), "both are used"
    for encoder in cluster.encoders:
        for seen in encoder.encodes:
            uuid = seen.json()["messages"][0]["content"][0]["uuid"]
            (call,) = [c for pd in cluster.pds for c in pd.calls if uuid.encode() in c.body]
            assert call in encoder.pd.calls


async def test_a_group_without_pd_leaves_the_work_to_the_other(clusters: Clusters) -> None:
    cluster = await clusters.fresh(encoders=4, pds=2)
    await cluster.pds[0].die()

    async def noticed() -> bool:
        return await pd_state(cluster, 0) == "down"

    await eventually(noticed, "one PD is down", 5)
    for n in range(6):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
        assert (await cluster.proxy.chat(body_of("hi"))).status == 200
    assert len(cluster.pds[1].calls) == 12
    assert all(not encoder.encodes for encoder in cluster.encoders if encoder.pd is cluster.pds[0])
    assert (await cluster.proxy.get("/health")).status == 200


async def test_a_group_without_encoders_leaves_media_to_the_other(clusters: Clusters) -> None:
    cluster = await clusters.fresh(encoders=2, pds=2)
    await cluster.encoders[0].stop(abort=True)

    async def noticed() -> bool:
        return (await cluster.proxy.state()).encoders[0].state != "ready"

    await eventually(noticed, "one group has no encoder", 5)
    for n in range(6):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    assert len(cluster.pds[1].calls) == 6


async def test_items_that_have_waited_too_long_are_encoded_again(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--staged-age", "0.5", "--encode-timeout", "5")
    slow = cluster.encoders[1]
    release = asyncio.Event()
    slow.then(after(release, slow.chat))
    asked = asyncio.ensure_future(cluster.proxy.chat(body_of(image("a"), image("b"))))
    await wait_for(lambda: cluster.encodes == 2, "both placed")
    staged_at = time.monotonic()
    await wait_for(lambda: time.monotonic() - staged_at > 0.7, "the first has waited too long")
    release.set()
    assert (await asked).status == 200
    assert cluster.encodes >= 3
    held = cluster.ledger.staged
    for media in media_parts(cluster.pd.calls[0].json()):
        (staged,) = held[media.part["uuid"]]
        assert cluster.pd.calls[0].at - staged.at < 0.7


async def test_own_requests_are_text_only(clusters: Clusters) -> None:
    cluster = await clusters.fresh()
    for encoder_id in ("encoder-0", "encoder-1"):
        await cluster.proxy.admin("POST", f"/admin/encoders/{encoder_id}/drain")
    await wait_for(lambda: cluster.pd.own, "a flush")
    for seen in cluster.pd.own:
        body = seen.json()
        assert body["max_tokens"] == 1
        assert body["model"] == "m", "the PD's own model"
        assert not media_parts(body)
        assert "image" not in json.dumps(body)


async def test_text_goes_on_while_media_waits(clusters: Clusters) -> None:
    cluster = await clusters.get()
    for encoder in cluster.encoders:
        encoder.always(hang)
    asked = [asyncio.ensure_future(cluster.proxy.chat(body_of(image(n)))) for n in range(10)]
    await wait_for(lambda: cluster.encodes >= 2, "media waits")
    for _ in range(10):
        reply = await cluster.proxy.chat(body_of("hi", stream=True))
        assert reply.status == 200
        assert reply.seconds < 1
    for task in asked:
        task.cancel()


async def test_a_role_chunk_of_a_stream_is_relayed(clusters: Clusters) -> None:
    cluster = await clusters.get()
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    cluster.pd.then(stream(role, event("a"), event(None, "stop"), b"data: [DONE]\n\n"))
    reply = await cluster.proxy.chat(body_of(image(1), stream=True))
    assert reply.body.startswith(role + event("a"))

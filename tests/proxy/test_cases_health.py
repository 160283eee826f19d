"""Health, readiness and models: from cached state, told apart, and true."""

import asyncio
import time

import pytest

from tests.fakes import Exchange, hang, shut
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, body_of, eventually, image, text, wait_for
from tests.proxy.upstreams import refuse


async def test_the_guides_keys_and_a_status(cluster: Cluster) -> None:
    reply = await cluster.proxy.get("/health")
    assert reply.status == 200
    health = reply.json()
    assert health["proxy"] == "healthy"
    assert health["encode_cluster"] == "healthy"
    assert health["decode_cluster"] == "healthy"
    assert health["status"] == "ok"


async def test_seven_of_eight_encoders_are_enough(clusters: Clusters) -> None:
    cluster = await clusters.fresh(encoders=8)
    await cluster.encoders[3].stop(abort=True)

    async def degraded() -> bool:
        return bool((await cluster.proxy.get("/health")).json()["status"] == "degraded")

    await eventually(degraded, "degraded", 5)
    reply = await cluster.proxy.get("/health")
    assert reply.status == 200
    assert reply.json()["proxy"] == "healthy"
    assert (await cluster.proxy.get("/readyz")).status == 200
    replies = await asyncio.gather(*(cluster.proxy.chat(body_of(image(n))) for n in range(16)))
    assert {reply.status for reply in replies} == {200}

    for encoder in cluster.encoders:
        await encoder.stop(abort=True)

    async def none_left() -> bool:
        return (await cluster.proxy.get("/readyz")).status == 503

    await eventually(none_left, "not ready", 10)
    at = time.monotonic()
    reply = await cluster.proxy.chat(body_of(image(1)))
    reply.error(503)
    assert int(reply.headers["retry-after"]) > 0
    assert time.monotonic() - at < 1
    assert (await cluster.proxy.chat(body_of(text()))).status == 200
    assert (await cluster.proxy.chat(body_of("hi", stream=True))).status == 200
    assert (await cluster.proxy.get("/livez")).status == 200

    for encoder in cluster.encoders:
        await encoder.start()
    await cluster.ready(15)
    assert (await cluster.proxy.get("/health")).json()["status"] == "ok"
    assert (await cluster.proxy.chat(body_of(image(1)))).status == 200


async def test_a_pd_that_is_down_is_503(clusters: Clusters) -> None:
    cluster = await clusters.get()
    await cluster.pd.die()

    async def down() -> bool:
        return (await cluster.proxy.get("/health")).status == 503

    await eventually(down, "the death is noticed", 5)
    health = (await cluster.proxy.get("/health")).json()
    assert health["status"] == "unavailable"
    assert health["decode_cluster"] == "unhealthy"
    assert (await cluster.proxy.get("/readyz")).status == 503
    assert (await cluster.proxy.get("/livez")).status == 200
    await cluster.pd.come_back()
    await cluster.ready(15)
    assert (await cluster.proxy.get("/health")).status == 200


async def test_it_starts_with_everything_down(clusters: Clusters) -> None:
    cluster = await clusters.fresh(up=False)
    for fake in cluster.fakes:
        await fake.stop()
    second = await clusters.fresh(encoders=0, up=False)
    assert (await cluster.proxy.get("/livez")).status == 200
    (await second.proxy.chat(body_of(image(1)))).error(503)
    assert (await second.proxy.get("/readyz")).status == 503
    await eventually(lambda: _text_is_served(second), "text without encoders", 5)
    for fake in cluster.fakes:
        await fake.start()
    await cluster.ready(15)
    assert (await cluster.proxy.chat(body_of(image(1)))).status == 200


async def _text_is_served(cluster: Cluster) -> bool:
    return (await cluster.proxy.chat(body_of("hi"))).status == 200


async def test_health_answers_at_once_with_a_stopped_encoder(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--probe-timeout", "0.5", "--pd-probe-timeout", "0.5", encoders=3)
    cluster.encoders[0].anything = hang
    slowest = 0.0

    async def out() -> bool:
        nonlocal slowest
        slowest = max(slowest, (await cluster.proxy.get("/health")).seconds)
        return (await cluster.proxy.state()).encoders[0].state != "ready"

    await eventually(out, "the stopped encoder is out", 10)
    assert slowest < 0.5
    assert (await cluster.proxy.get("/health")).json()["status"] == "degraded"
    for _ in range(4):
        assert (await cluster.proxy.chat(body_of(image(1)))).status == 200
    assert not cluster.encoders[0].encodes
    cluster.encoders[0].anything = None
    cluster.encoders[0].drop()
    await cluster.ready(10)


async def test_one_missed_probe_is_no_reason(clusters: Clusters) -> None:
    cluster = await clusters.get()
    flapped: list[str] = []

    async def one_miss() -> None:
        encoder = cluster.encoders[0]
        encoder.then(shut, path="/health", method="GET")
        await wait_for(lambda: not encoder.once["GET", "/health"], "the probe was missed")
        before = len(encoder.requests("/health", "GET"))
        await wait_for(lambda: len(encoder.requests("/health", "GET")) > before, "the next probe")
        flapped.append((await cluster.proxy.state()).encoders[0].state)

    for _ in range(3):
        await one_miss()
    assert flapped == ["ready"] * 3


async def test_probes_go_to_all_at_once(clusters: Clusters) -> None:
    cluster = await clusters.fresh(encoders=6)
    for encoder in cluster.encoders[:5]:
        encoder.always(hang, "/health", "GET")
    last = cluster.encoders[5]
    before = len(last.requests("/health", "GET"))
    at = time.monotonic()
    await wait_for(lambda: len(last.requests("/health", "GET")) >= before + 5, "probed on")
    assert time.monotonic() - at < 2, "the slow ones do not delay the probes of others"


async def test_an_engine_that_hangs_behind_a_good_health_is_ejected(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--encode-timeout", "0.3", "--eject-after", "3")
    hung = cluster.encoders[0]
    hung.always(hang)
    for n in range(12):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    info = (await cluster.proxy.state()).encoders[0]
    assert info.state == "ejected"
    assert info.reason
    assert info.since > 0
    assert len(hung.encodes) <= 5, "it burns no more than the threshold and a trial"
    hung.always(hung.chat)
    await cluster.ready(15)
    before = len(hung.encodes)
    for n in range(4):
        assert (await cluster.proxy.chat(body_of(image(n)))).status == 200
    assert len(hung.encodes) > before


async def test_models_pass_unmodified(cluster: Cluster) -> None:
    answer = b'{ "object":"list","data":[{"id":"m","root":"./m","max_model_len":4096,"x":1.0}]}'

    async def models(exchange: Exchange) -> None:
        await exchange.answer(200, answer)

    cluster.pd.always(models, "/v1/models", "GET")
    reply = await cluster.proxy.get("/v1/models", {"authorization": "Bearer k", "x-y": "z"})
    assert (reply.status, reply.body) == (200, answer)
    seen = cluster.pd.requests("/v1/models", "GET")[-1]
    assert seen.header("authorization") == "Bearer k"


async def test_models_with_a_refusing_pd(cluster: Cluster) -> None:
    async def unauthorized(exchange: Exchange) -> None:
        await exchange.json(401, {"error": "Unauthorized"})

    cluster.pd.always(unauthorized, "/v1/models", "GET")
    reply = await cluster.proxy.get("/v1/models")
    assert (reply.status, reply.json()) == (401, {"error": "Unauthorized"})
    cluster.pd.always(refuse(500, "x"), "/v1/models", "GET")
    assert (await cluster.proxy.get("/v1/models")).error(500)["message"] == "x"


async def test_models_with_a_slow_and_a_dead_pd(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--first-byte-timeout", "0.5")
    cluster.pd.always(hang, "/v1/models", "GET")
    reply = await cluster.proxy.get("/v1/models")
    reply.error(502, 503, 504)
    await cluster.pd.die()
    (await cluster.proxy.get("/v1/models")).error(502, 503)


async def test_models_of_the_first_pd_that_lives(clusters: Clusters) -> None:
    cluster = await clusters.fresh(pds=2)
    await cluster.pds[0].die()
    reply = await cluster.proxy.get("/v1/models")
    assert reply.status == 200
    assert cluster.pds[1].requests("/v1/models", "GET")


@pytest.mark.parametrize("path", ["/version"])
async def test_small_endpoints_pass(cluster: Cluster, path: str) -> None:
    assert (await cluster.proxy.get(path)).json() == {"version": "0.30.0"}


async def test_livez_says_nothing_of_upstreams(clusters: Clusters) -> None:
    cluster = await clusters.fresh(up=False)
    for fake in cluster.fakes:
        fake.anything = hang
    reply = await cluster.proxy.get("/livez")
    assert reply.status == 200
    assert reply.seconds < 0.5

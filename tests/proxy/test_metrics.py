"""Prometheus: a valid exposition, bounded labels, outcomes that tell an abort from a success."""

import asyncio
import re
import resource

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import CHAT, hang
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, body_of, image, parse_metrics, wait_for
from tests.proxy.upstreams import DONE, after, event, refuse, stream

OUTCOMES = {"ok", "client_error", "busy", "upstream_error", "client_closed"}


def requests(samples: dict[str, float], outcome: str, route: str = CHAT) -> float:
    """The counter of one route and outcome."""
    return sum(
        value
        for key, value in samples.items()
        if key.startswith("eccon_proxy_requests_total{")
        and f'outcome="{outcome}"' in key
        and f'route="{route}"' in key
    )


async def test_names_stay_few_whatever_clients_send(cluster: Cluster) -> None:
    cluster.pd.always(refuse(404, "no such model"))
    warm = [body_of(image(1)), body_of("hi", model='a"b\nc'), b"{bad", body_of("hi", stream=True)]
    for body in warm:
        await cluster.proxy.chat(body)
    await cluster.proxy.get("/x")
    before = await cluster.proxy.metrics()
    room = asyncio.Semaphore(20)

    async def odd(n: int) -> None:
        async with room:
            await cluster.proxy.chat(body_of("hi", model=f'm{n}"\\\n{{}}'))
            await cluster.proxy.get(f"/path/{n}?q={n}")

    await asyncio.gather(*(odd(n) for n in range(500)))
    after_ = await cluster.proxy.metrics()
    new = set(after_) - set(before)
    assert len(new) < 30, sorted(new)
    assert not [key for key in after_ if "/path/" in key]
    labels = {match for key in after_ for match in re.findall(r'outcome="([^"]*)"', key)}
    assert labels <= OUTCOMES


async def test_outcomes_are_told_apart(clusters: Clusters) -> None:
    cluster = await clusters.fresh("--max-inflight", "1", "--queue", "0")
    proxy = cluster.proxy
    assert (await proxy.chat(body_of(image(1)))).status == 200
    assert (await proxy.chat(b"{bad")).status == 400
    cluster.pd.then(refuse(500, "x"))
    assert (await proxy.chat(body_of("hi"))).status == 500
    go = asyncio.Event()
    cluster.pd.then(after(go, stream()))
    first = asyncio.ensure_future(proxy.chat(body_of("hi", stream=True)))
    await wait_for(lambda: len(cluster.pd.calls) == 3, "one in flight")
    reply = await proxy.chat(body_of("hi"))
    reply.error(429, 503)
    go.set()
    await first
    cluster.pd.then(hang)
    left = asyncio.ensure_future(proxy.chat(body_of("hi", stream=True)))
    await wait_for(lambda: len(cluster.pd.calls) == 4, "one more in flight")
    left.cancel()
    await wait_for(lambda: cluster.pd.calls[3].closed_at, "the abort is passed on")
    await cluster.idle()
    samples = await proxy.metrics()
    counted = {outcome: requests(samples, outcome) for outcome in sorted(OUTCOMES)}
    assert counted == {"busy": 1, "client_closed": 1, "client_error": 1, "ok": 2, "upstream_error": 1}


async def test_gauges_follow_what_is_in_flight(cluster: Cluster) -> None:
    go = asyncio.Event()
    cluster.pd.always(after(go, stream(event("a"), DONE)))
    asked = [asyncio.ensure_future(cluster.proxy.chat(body_of(image(n), stream=True))) for n in range(3)]
    await wait_for(lambda: len(cluster.pd.calls) == 3, "three at the PD")
    samples = await cluster.proxy.metrics()
    inflight = {k: v for k, v in samples.items() if k.startswith("eccon_proxy_inflight_")}
    assert 3.0 in inflight.values()
    go.set()
    await asyncio.gather(*asked)


async def test_what_an_operator_needs_is_there(cluster: Cluster) -> None:
    cluster.encoders[0].then(refuse(500, "x"))
    for n in range(4):
        await cluster.proxy.chat(body_of(image(n), stream=True))
    names = {re.split(r"[{ ]", key)[0] for key in await cluster.proxy.metrics()}
    wanted = ("requests_total", "inflight_", "encode_seconds", "staged", "retries", "gate_wait", "first_byte",
              "epoch", "stalls", "ejections", "orphan", "bytes")  # fmt: skip
    ours = {name for name in names if name.startswith("eccon_proxy_")}
    missing = [word for word in wanted if not any(word in name for name in ours)]
    assert not missing, sorted(ours)


async def test_retries_are_counted_by_reason(clusters: Clusters) -> None:
    cluster = await clusters.get("--eject-after", "1000")
    before = await cluster.proxy.metrics()
    cluster.encoders[0].then(refuse(500, "x"))
    cluster.encoders[1].then(refuse(500, "x"))
    assert (await cluster.proxy.chat(body_of(image(1)))).status in {200, 502, 503}
    samples = await cluster.proxy.metrics()
    grown = {k for k, v in samples.items() if "retries" in k and v > before.get(k, 0.0)}
    assert grown
    assert all("reason=" in key for key in grown)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("streams", [1000])
async def test_a_scrape_is_quick_under_load(cluster: Cluster, streams: int) -> None:
    # The fakes' and the clients' ends are descriptors of this process.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        go = asyncio.Event()
        cluster.pd.always(after(go, stream()))
        body = body_of("hi", stream=True)
        asked = [asyncio.ensure_future(cluster.proxy.chat(body, within=200)) for _ in range(streams)]
        await wait_for(
            lambda: len(cluster.pd.requests()) >= streams or any(task.done() for task in asked),
            "all at the PD",
            150,
        )
        assert not [task.result().body for task in asked if task.done()], "none is refused"
        scrapes = [await cluster.proxy.get("/metrics") for _ in range(5)]
        assert min(reply.seconds for reply in scrapes) < 0.1
        assert parse_metrics(scrapes[0].body.decode())["eccon_proxy_inflight_requests"] == streams
        go.set()
        assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_prometheus_own_parser_reads_it(clusters: Clusters) -> None:
    cluster = await clusters.get()
    cluster.encoders[0].then(refuse(500, "once"))
    for body in (body_of(image(1), image(2)), body_of("hi", stream=True), b"{bad"):
        await cluster.proxy.chat(body)
    families = list(text_string_to_metric_families((await cluster.proxy.get("/metrics")).body.decode()))
    assert len({family.name for family in families}) == len(families) > 20
    for family in families:
        assert family.name.startswith("eccon_proxy_")
        assert family.documentation.endswith(".")
        assert family.type in {"counter", "gauge", "histogram"}
        if family.type == "counter":
            assert all(sample.name == f"{family.name}_total" for sample in family.samples)


async def test_head_and_type_of_the_exposition(cluster: Cluster) -> None:
    reply = await cluster.proxy.get("/metrics", {"accept": "application/openmetrics-text"})
    assert reply.headers["content-type"].startswith(("text/plain", "application/openmetrics-text"))

"""Traces at an OpenTelemetry collector: a small receiver on loopback decodes what really arrives."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.fakes import Exchange, Fake, hang
from tests.proxy.conftest import Clusters
from tests.proxy.support import Cluster, body_of, image, wait_for
from tests.proxy.upstreams import refuse

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}


class Collector(Fake):
    """Takes OTLP over HTTP and keeps the spans."""

    def __init__(self) -> None:
        super().__init__("collector")
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}
        self.always(self.take, "/v1/traces", "POST")

    async def take(self, exchange: Exchange) -> None:
        """Decode one export."""
        assert exchange.seen.header("content-type") == "application/x-protobuf"
        for group in ExportTraceServiceRequest.FromString(exchange.seen.body).resource_spans:
            self.resource = values(group.resource)
            for scope in group.scope_spans:
                self.spans += scope.spans
        await exchange.answer(200, b"", [("content-type", "application/x-protobuf")])

    def root(self, request_id: str) -> Span | None:
        """The span of one request."""
        return next((s for s in self.spans if values(s).get("eccon.request_id") == request_id), None)

    def below(self, root: Span) -> list[Span]:
        """The spans right below it."""
        return [span for span in self.spans if span.parent_span_id == root.span_id]


def values(thing: Any) -> dict[str, Any]:
    """Attributes as a dictionary."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in thing.attributes}


@pytest_asyncio.fixture(loop_scope="session")
async def collector() -> AsyncIterator[Collector]:
    """A receiver of OTLP."""
    one = Collector()
    await one.start()
    yield one
    await one.stop()


async def traced(clusters: Clusters, collector: Collector, **env: str) -> Cluster:
    """A cluster whose proxy exports."""
    flags = ("--otlp-endpoint", collector.url, "--eject-after", "1000")
    cluster = await clusters.fresh(*flags, env={**SOON, **env})
    cluster.base_fds += 1  # the exporter keeps its connection
    return cluster


async def root_of(collector: Collector, request_id: str) -> Span:
    """The span of a request, when it has arrived."""
    await wait_for(lambda: collector.root(request_id), "the span arrives", 10)
    root = collector.root(request_id)
    assert root is not None
    return root


async def test_a_request_is_a_tree_of_spans(clusters: Clusters, collector: Collector) -> None:
    cluster = await traced(clusters, collector)
    cluster.encoders[0].then(refuse(500, "warming up"))
    body = body_of(image(1), image(2), stream=True)
    assert (await cluster.proxy.chat(body, {"x-request-id": "tree"})).status == 200
    root = await root_of(collector, "tree")
    assert collector.resource["service.name"] == "eccon-proxy"
    assert root.name == "POST /v1/chat/completions"
    assert root.kind == Span.SPAN_KIND_SERVER
    assert not root.parent_span_id
    assert root.status.code != Status.STATUS_CODE_ERROR
    said = values(root)
    assert said["http.route"] == "/v1/chat/completions"
    assert (said["http.request.method"], said["http.response.status_code"]) == ("POST", 200)
    assert (said["eccon.items"], said["eccon.outcome"], said["eccon.stream"]) == (2, "ok", True)
    assert said["gen_ai.request.model"] == "m"
    assert said["eccon.ttft_s"] > 0
    below = collector.below(root)
    assert sorted(span.name for span in below) == ["encode"] * 3 + ["gate", "pd", "stream"]
    assert {span.trace_id for span in below} == {root.trace_id}
    for span in below:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano + 1000
        assert span.kind == (
            Span.SPAN_KIND_CLIENT if span.name in {"encode", "pd"} else Span.SPAN_KIND_INTERNAL
        )
    encodes = [span for span in below if span.name == "encode"]
    assert {values(span)["eccon.item"] for span in encodes} == {0, 1}
    failed = [span for span in encodes if span.status.code == Status.STATUS_CODE_ERROR]
    assert [values(span)["eccon.encoder"] for span in failed] == ["encoder-0"]
    assert "warming up" in failed[0].status.message
    uuids = {values(span)["eccon.uuid"] for span in encodes}
    assert all(
        uuid.encode() in cluster.pd.calls[0].body for uuid in uuids - {values(failed[0])["eccon.uuid"]}
    )


async def test_a_clients_trace_goes_on_through_the_proxy(clusters: Clusters, collector: Collector) -> None:
    cluster = await traced(clusters, collector)
    given = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b", "x-request-id": "mine"}
    assert (await cluster.proxy.chat(body_of(image(1)), given)).status == 200
    root = await root_of(collector, "mine")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    upstream = [seen for fake in cluster.fakes for seen in fake.requests()]
    assert len(upstream) == 2
    for seen in upstream:
        assert seen.header("traceparent") == f"00-{TRACE}-{root.span_id.hex()}-01"
        assert seen.header("tracestate") == "a=b"


async def test_without_a_clients_trace_one_begins_here(clusters: Clusters, collector: Collector) -> None:
    cluster = await traced(clusters, collector)
    bad = {"traceparent": f"00-{'0' * 32}-{PARENT}-01", "tracestate": "a=b", "x-request-id": "new"}
    assert (await cluster.proxy.chat(body_of(image(1)), bad)).status == 200
    root = await root_of(collector, "new")
    assert not root.parent_span_id
    for seen in (seen for fake in cluster.fakes for seen in fake.requests()):
        parent = seen.header("traceparent") or ""
        assert parent.startswith(f"00-{root.trace_id.hex()}-{root.span_id.hex()}-")
        assert int(parent[-2:], 16) & 1, "sampled"
        assert seen.header("tracestate") is None


async def test_who_is_not_sampled_is_not_exported(clusters: Clusters, collector: Collector) -> None:
    cluster = await traced(clusters, collector)
    given = {"traceparent": f"00-{TRACE}-{PARENT}-00", "x-request-id": "quiet"}
    assert (await cluster.proxy.chat(body_of("hi"), given)).status == 200
    assert (await cluster.proxy.chat(body_of("hi"), {"x-request-id": "loud"})).status == 200
    await root_of(collector, "loud")
    assert collector.root("quiet") is None
    parent = cluster.pd.calls[0].header("traceparent") or ""
    assert parent.startswith(f"00-{TRACE}-")
    assert parent.endswith("-00")


async def test_failures_are_told_apart(clusters: Clusters, collector: Collector) -> None:
    cluster = await traced(clusters, collector, OTEL_SERVICE_NAME="mine")
    assert (await cluster.proxy.chat(b"{bad", {"x-request-id": "client"})).status == 400
    cluster.pd.then(refuse(500, "engine"))
    assert (await cluster.proxy.chat(body_of("hi"), {"x-request-id": "pd"})).status == 500
    client, pd = await root_of(collector, "client"), await root_of(collector, "pd")
    assert client.status.code != Status.STATUS_CODE_ERROR
    assert values(client)["eccon.error"]
    assert pd.status.code == Status.STATUS_CODE_ERROR
    assert values(pd)["http.response.status_code"] == 500
    assert collector.resource["service.name"] == "mine"


async def test_a_collector_that_hangs_holds_nothing_up(clusters: Clusters, collector: Collector) -> None:
    collector.always(hang, "/v1/traces", "POST")
    cluster = await clusters.fresh(
        "--otlp-endpoint", f"{collector.url}/v1/traces", "--drain-delay", "0", env=SOON
    )
    replies = await asyncio.gather(*(cluster.proxy.chat(body_of(image(n))) for n in range(20)))
    assert {reply.status for reply in replies} == {200}
    await wait_for(lambda: collector.requests("/v1/traces"), "an export is under way")
    cluster.proxy.signal(signal.SIGTERM)
    assert await cluster.proxy.exited(8) == 0


@pytest.mark.parametrize("how", ["check", "start"])
async def test_without_its_packages_it_says_which(tmp_path: Path, how: str) -> None:
    without = "import sys; sys.modules['opentelemetry'] = None\nfrom eccon_proxy.cli import main\nmain()"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", without, "--otlp-endpoint", "http://127.0.0.1:4318"),
        *("--decode-servers-urls", "http://127.0.0.1:9", "--host", "127.0.0.1", "--port", "0"),
        *(["--check"] if how == "check" else ["--admin", f"unix:{tmp_path}/a.sock"]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2, output
    assert b"opentelemetry-sdk" in output
    assert b"Traceback" not in output

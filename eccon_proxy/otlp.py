"""Traces to an OpenTelemetry collector, when `--otlp-endpoint` names one.

The SDK is imported only then; it batches and sends in a thread of its own, and its own variables
(`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_TRACES_SAMPLER`, …) hold. The span of a request is begun with it: so
the servers behind are told of it as their parent, and it stands below the client's when that brought a
`traceparent`. The spans of its way are added when it has ended.
"""

import importlib
import os
import threading
from collections.abc import Iterable
from typing import Any

from eccon_proxy.headers import trace_context
from eccon_proxy.schema import Span, Trace
from eccon_proxy.settings import SettingsError

__all__ = ["Exporter", "Root"]

NANO = 1_000_000_000
CLOSE_SECONDS = 2.0
"""Longest wait at the end for what has not been sent: a collector may be away."""
_NEEDED = "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"


class Root:
    """The span of one request, not yet ended, and the header lines that name it to the servers behind."""

    __slots__ = ("lines", "span")

    def __init__(self, span: Any, lines: bytes) -> None:
        self.span = span
        self.lines = lines


class Exporter:
    """Turns traces into OpenTelemetry spans."""

    def __init__(self, endpoint: str) -> None:
        try:
            sdk = importlib.import_module("opentelemetry.sdk.trace")
            export = importlib.import_module("opentelemetry.sdk.trace.export")
            resources = importlib.import_module("opentelemetry.sdk.resources")
            http = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            self._api: Any = importlib.import_module("opentelemetry.trace")
            propagation = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        except ImportError as error:
            raise SettingsError(f"--otlp-endpoint needs {_NEEDED}: {error}") from None
        name = os.environ.get("OTEL_SERVICE_NAME") or "eccon-proxy"
        resource = resources.Resource.create({"service.name": name})
        self._provider: Any = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        path = "" if endpoint.rstrip("/").endswith("/v1/traces") else "/v1/traces"
        exporter = http.OTLPSpanExporter(endpoint=endpoint.rstrip("/") + path)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer: Any = self._provider.get_tracer("eccon_proxy")
        self._propagator: Any = propagation.TraceContextTextMapPropagator()

    def begin(
        self, headers: Iterable[tuple[bytes, bytes]], method: str, route: str, started_at: float
    ) -> Root:
        """Begin the span of a request. `started_at` is a Unix time."""
        span = self._tracer.start_span(
            f"{method} {route}",
            context=self._propagator.extract(trace_context(headers)),
            kind=self._api.SpanKind.SERVER,
            start_time=round(started_at * NANO),
            attributes={"http.request.method": method, "http.route": route},
        )
        told: dict[str, str] = {}
        self._propagator.inject(told, context=self._api.set_span_in_context(span))
        return Root(span, b"".join(b"%b: %b\r\n" % (k.encode(), v.encode()) for k, v in told.items()))

    def export(self, trace: Trace, root: Root) -> None:
        """End the span of a finished request, with those of its way below it."""
        span, at = root.span, trace.started_at
        attributes: dict[str, str | int | float] = {
            "eccon.request_id": trace.id,
            "http.response.status_code": trace.status,
            "gen_ai.request.model": trace.model,
            "eccon.items": trace.items,
            "eccon.outcome": trace.outcome,
            "eccon.stream": trace.stream,
        }
        known = {
            "gen_ai.usage.input_tokens": trace.prompt_tokens,
            "gen_ai.usage.output_tokens": trace.completion_tokens,
            "eccon.ttft_s": trace.ttft_s,
            "eccon.error": trace.error or None,
        }
        attributes |= {name: value for name, value in known.items() if value is not None}
        span.set_attributes(attributes)
        # What a client did wrong, or its leaving, is no error of this server.
        if trace.outcome in {"upstream_error", "busy"}:
            span.set_status(self._api.StatusCode.ERROR, trace.error)
        below = self._api.set_span_in_context(span)
        end = at + (trace.total_s or 0.0)
        for one in trace.spans:
            self._child(one, below, at, end)
        span.end(end_time=round(end * NANO))

    def _child(self, span: Span, below: Any, at: float, end: float) -> None:
        asks = span.kind in {"encode", "pd"}
        attributes: dict[str, str | int] = {"eccon.attempt": span.attempt} if span.attempt else {}
        if span.item is not None:
            attributes["eccon.item"] = span.item
        attributes |= {
            name: value
            for name, value in (("eccon.encoder", span.encoder), ("eccon.uuid", span.uuid))
            if value
        }
        child = self._tracer.start_span(
            span.kind,
            context=below,
            kind=self._api.SpanKind.CLIENT if asks else self._api.SpanKind.INTERNAL,
            start_time=round((at + span.start) * NANO),
            attributes=attributes,
        )
        if span.outcome in {"error", "timeout"}:
            child.set_status(self._api.StatusCode.ERROR, span.error or span.outcome)
        elif span.outcome != "ok":
            child.set_attribute("eccon.outcome", span.outcome)
        child.end(end_time=round((end if span.end is None else at + span.end) * NANO))

    def close(self, *, hurry: bool = False) -> None:
        """Send what waits and end; what cannot be sent within two seconds, or in a hurry, is lost."""
        # Not in the loop's executor: its threads are waited for at the exit, however long.
        sending = threading.Thread(target=self._provider.shutdown, name="otlp end", daemon=True)
        sending.start()
        sending.join(0.0 if hurry else CLOSE_SECONDS)

"""Finished traces to an OpenTelemetry collector, when `--otlp-endpoint` names one.

The SDK is imported only then; it batches and sends in a thread of its own. A request that brought a
`traceparent` is continued, so its spans stand below the caller's.
"""

import importlib
from typing import Any

from eccon_proxy.schema import Trace
from eccon_proxy.settings import SettingsError

__all__ = ["Exporter"]

NANO = 1_000_000_000
_NEEDED = "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"


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
        resource = resources.Resource.create({"service.name": "eccon-proxy"})
        self._provider: Any = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        path = "" if endpoint.rstrip("/").endswith("/v1/traces") else "/v1/traces"
        exporter = http.OTLPSpanExporter(endpoint=endpoint.rstrip("/") + path)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer: Any = self._provider.get_tracer("eccon_proxy")
        self._propagator: Any = propagation.TraceContextTextMapPropagator()

    def export(self, trace: Trace, traceparent: str, tracestate: str = "") -> None:
        """Hand over one finished trace."""
        carrier = {"traceparent": traceparent, "tracestate": tracestate} if traceparent else {}
        parent = self._propagator.extract(carrier)
        attributes: dict[str, str | int | float] = {
            "eccon.request_id": trace.id,
            "http.route": trace.route,
            "http.response.status_code": trace.status,
            "gen_ai.request.model": trace.model,
            "eccon.items": trace.items,
            "eccon.outcome": trace.outcome,
        }
        known = {
            "gen_ai.usage.input_tokens": trace.prompt_tokens,
            "gen_ai.usage.output_tokens": trace.completion_tokens,
            "eccon.ttft_s": trace.ttft_s,
        }
        attributes |= {name: value for name, value in known.items() if value is not None}
        at = trace.started_at
        root = self._tracer.start_span(
            trace.route, context=parent, start_time=round(at * NANO), attributes=attributes
        )
        if trace.error:
            root.set_status(self._api.StatusCode.ERROR, trace.error)
        below = self._api.set_span_in_context(root)
        end = at + (trace.total_s or 0.0)
        for span in trace.spans:
            one = self._tracer.start_span(
                span.kind,
                context=below,
                start_time=round((at + span.start) * NANO),
                attributes={
                    "eccon.encoder": span.encoder,
                    "eccon.uuid": span.uuid,
                    "eccon.item": -1 if span.item is None else span.item,
                    "eccon.attempt": span.attempt,
                },
            )
            if span.outcome != "ok":
                one.set_status(self._api.StatusCode.ERROR, span.error or span.outcome)
            one.end(end_time=round((end if span.end is None else at + span.end) * NANO))
        root.end(end_time=round(end * NANO))

    def close(self) -> None:
        """Send what waits and end."""
        self._provider.shutdown()

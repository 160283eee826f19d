"""Each request's way as spans, kept in a ring of bounded bytes.

A `Recorder` is written while the request runs and costs a few attribute stores; the struct that clients
of the admin API see is made when somebody looks.
"""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from eccon_proxy.schema import Outcome, Span, SpanKind, Trace

if TYPE_CHECKING:
    from eccon_proxy.otlp import Root

__all__ = ["Recorder", "SpanRecord", "Traces"]

SpanOutcome = Literal["ok", "error", "timeout", "cancelled"]
LONGEST_NAME = 256
_TRACE_BYTES = 700
_SPAN_BYTES = 350


class SpanRecord:
    """One stretch, being measured; times are those of `time.perf_counter()`."""

    __slots__ = ("attempt", "encoder", "end", "error", "item", "kind", "outcome", "start", "uuid")

    def __init__(
        self, kind: SpanKind, start: float, item: int | None, attempt: int, encoder: str, uuid: str
    ) -> None:
        self.kind: SpanKind = kind
        self.start = start
        self.end: float | None = None
        self.item = item
        self.attempt = attempt
        self.encoder = encoder
        self.uuid = uuid
        self.outcome: SpanOutcome = "ok"
        self.error = ""

    def close(self, outcome: SpanOutcome = "ok", error: str = "", *, at: float | None = None) -> None:
        """End it, now or `at` another time."""
        if self.end is None:
            self.end = time.perf_counter() if at is None else at
            self.outcome = outcome
            self.error = error[:500]


class Recorder:
    """One request, being measured."""

    __slots__ = (
        "completion_tokens", "error", "first_byte", "id", "items", "model", "outcome", "prompt_tokens",
        "root", "route", "spans", "start", "started_at", "status", "stream", "total",
    )  # fmt: skip

    def __init__(self, trace_id: str, route: str) -> None:
        self.id = trace_id
        self.route = route
        self.started_at = time.time()
        self.start = time.perf_counter()
        self.model = ""
        self.root: Root | None = None
        """Its span for OpenTelemetry, when traces are exported."""
        self.status = 0
        self.outcome: Outcome = ""
        self.stream = False
        self.items = 0
        self.spans: list[SpanRecord] = []
        self.first_byte: float | None = None
        self.total: float | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.error = ""

    def span(
        self, kind: SpanKind, *, item: int | None = None, attempt: int = 0, encoder: str = "", uuid: str = ""
    ) -> SpanRecord:
        """Begin a span."""
        record = SpanRecord(kind, time.perf_counter(), item, attempt, encoder, uuid)
        self.spans.append(record)
        return record

    def gate(self) -> None:
        """All items are staged: from the first one's end on, the request waited for the others."""
        ends = [s.end for s in self.spans if s.kind == "encode" and s.outcome == "ok" and s.end is not None]
        record = self.span("gate")
        record.start, record.end = min(ends), max(ends)

    def finish(self, status: int, outcome: Outcome, error: str = "") -> None:
        """End the trace and what is still open in it."""
        now = time.perf_counter()
        self.total = now - self.start
        # What the client made up is kept for long: not at any length.
        self.model = self.model[:LONGEST_NAME]
        self.status = status
        self.outcome = outcome
        self.error = error[:1000]
        for span in self.spans:
            span.uuid = span.uuid[:LONGEST_NAME]
            if span.end is None:
                how: SpanOutcome = "cancelled" if outcome == "client_closed" else "error" if error else "ok"
                span.close(how, error, at=now)

    def snapshot(self) -> Trace:
        """What it is now, as the admin API says it."""
        spans = tuple(
            Span(
                kind=s.kind,
                start=s.start - self.start,
                end=None if s.end is None else s.end - self.start,
                item=s.item,
                attempt=s.attempt,
                encoder=s.encoder,
                uuid=s.uuid,
                outcome=s.outcome,
                error=s.error,
            )
            for s in self.spans
        )
        return Trace(
            id=self.id,
            started_at=self.started_at,
            route=self.route,
            model=self.model,
            status=self.status,
            outcome=self.outcome,
            stream=self.stream,
            items=self.items,
            spans=spans,
            ttft_s=None if self.first_byte is None else self.first_byte - self.start,
            total_s=self.total,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            error=self.error,
        )


class Traces:
    """The last requests, in order of their start; finished ones go when the ring is full."""

    def __init__(self, limit: int, on_change: Callable[[Recorder], None]) -> None:
        self._limit = limit
        self._on_change = on_change
        self._all: dict[str, Recorder] = {}
        self._bytes = 0
        self._sizes: dict[str, int] = {}
        self._serial = 0

    def begin(self, wanted: str, route: str) -> Recorder:
        """Start a trace under the id that the client chose, with a suffix when that is taken."""
        trace_id = wanted
        while trace_id in self._all:
            self._serial += 1
            suffix = f"-{self._serial:x}"
            trace_id = wanted[: 128 - len(suffix)] + suffix
        recorder = self._all[trace_id] = Recorder(trace_id, route)
        self._on_change(recorder)
        return recorder

    def changed(self, recorder: Recorder) -> None:
        """Tell whoever listens."""
        self._on_change(recorder)

    def finish(self, recorder: Recorder) -> None:
        """A trace has ended: it counts for the ring from now on."""
        size = _TRACE_BYTES + _SPAN_BYTES * len(recorder.spans)
        self._sizes[recorder.id] = size
        self._bytes += size
        while self._bytes > self._limit and self._sizes:
            oldest = next(iter(self._sizes))
            self._bytes -= self._sizes.pop(oldest)
            self._all.pop(oldest, None)
        self._on_change(recorder)

    def get(self, trace_id: str) -> Recorder | None:
        """One trace by its id."""
        return self._all.get(trace_id)

    def newest(self) -> Iterator[Recorder]:
        """All of them, newest first."""
        return reversed(self._all.values())

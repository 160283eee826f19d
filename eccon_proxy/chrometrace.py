"""Traces as Chrome trace JSON: open them in Perfetto or chrome://tracing."""

from collections.abc import Iterable
from typing import Any

from eccon_proxy.schema import Trace

__all__ = ["chrome_trace"]

MICRO = 1_000_000


def chrome_trace(traces: Iterable[Trace]) -> dict[str, Any]:
    """One process a request, one thread a row: the request itself, then each item and the PD."""
    events: list[dict[str, Any]] = []
    for pid, trace in enumerate(traces, 1):
        events.append(
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{trace.id} {trace.model}"}}
        )
        total = trace.total_s
        if total is None:
            total = max((s.end or s.start for s in trace.spans), default=0.0)
        events.append(_slice(trace, pid, 0, f"{trace.route} {trace.status}", 0.0, total, {}))
        for span in trace.spans:
            name = f"{span.kind} {span.encoder}".strip()
            row = 1 if span.item is None else 2 + span.item
            args = {
                "item": span.item, "attempt": span.attempt, "uuid": span.uuid,
                "outcome": span.outcome, "error": span.error,
            }  # fmt: skip
            end = total if span.end is None else span.end
            events.append(_slice(trace, pid, row, name, span.start, end, args))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _slice(
    trace: Trace, pid: int, row: int, name: str, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "eccon", "name": name, "pid": pid, "tid": row, "args": args,
        "ts": round((trace.started_at + start) * MICRO), "dur": round(max(0.0, end - start) * MICRO),
    }  # fmt: skip

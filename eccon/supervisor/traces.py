"""Requests as the proxy tells them, with what the connector's log adds: push, wait, pull of each item."""

from collections import OrderedDict, deque

import msgspec

from eccon.model import Quantiles, Span, Trace
from eccon.signals.transfers import Delivery, quantiles
from eccon.supervisor.board import Board

__all__ = ["Traces"]

EARLY_MAX = 2048
"""Deliveries whose trace has not been told yet; the oldest give way."""
RECENT = 500
"""Requests that the time to the first token is of."""


class Traces:
    """Merges and puts on the board. A trace keeps its transfer spans when the proxy tells it anew."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._plain: dict[str, Trace] = {}
        self._added: dict[str, list[Span]] = {}
        self._by_uuid: dict[str, str] = {}
        self._early: OrderedDict[str, Delivery] = OrderedDict()
        self._ttft: deque[float] = deque(maxlen=RECENT)
        self.begun = 0
        """Requests that began since the daemon started."""
        self.open: set[str] = set()
        """Ids of those in flight."""

    def take(self, trace: Trace) -> None:
        """A trace from the proxy, new or further on."""
        before = self._plain.get(trace.id)
        if before is None:
            self.begun += 1
        if trace.ttft_s is not None and (before is None or before.ttft_s is None):
            self._ttft.append(trace.ttft_s * 1000)
        self._plain[trace.id] = trace
        (self.open.add if trace.status == 0 else self.open.discard)(trace.id)
        for span in trace.spans:
            if span.kind == "encode" and span.uuid and self._is_latest(trace, span.uuid):
                self._by_uuid[span.uuid] = trace.id
                if early := self._early.pop(span.uuid, None):
                    self._add(trace, early)
        self._show(trace)

    def lost(self, still: set[str]) -> None:
        """The proxy began anew and knows only the requests `still`: the others ended with it."""
        for trace_id in self.open - still:
            trace = self._plain[trace_id]
            self.take(
                msgspec.structs.replace(
                    trace, status=499, outcome="upstream_error", error="the proxy ended during this request"
                )
            )

    def deliver(self, delivery: Delivery) -> None:
        """An item that arrived at the PD."""
        trace = self._plain.get(self._by_uuid.get(delivery.mm_hash, ""))
        if trace is None or self._is_of_a_later_one(trace, delivery):
            self._early[delivery.mm_hash] = delivery
            if len(self._early) > EARLY_MAX:
                self._early.popitem(last=False)
            return
        self._add(trace, delivery)
        self._show(trace)

    def _is_latest(self, trace: Trace, uuid: str) -> bool:
        """Whether a trace is news to a name: with `--identity content` one goes through many requests."""
        known = self._plain.get(self._by_uuid.get(uuid, ""))
        return known is None or (known.id != trace.id and known.started_at < trace.started_at)

    def _is_of_a_later_one(self, trace: Trace, delivery: Delivery) -> bool:
        """Whether a request is over that has its delivery: then another one asked for the item again."""
        added = self._added.get(trace.id, ())
        return trace.id not in self.open and any(s.uuid == delivery.mm_hash for s in added)

    def ttft(self) -> Quantiles | None:
        """Of the recent requests, in milliseconds."""
        return quantiles(self._ttft)

    def _add(self, trace: Trace, d: Delivery) -> None:
        encode = next((s for s in trace.spans if s.kind == "encode" and s.uuid == d.mm_hash), None)
        if encode is None:
            return
        # The encoder writes its line after it has sent: the PD may have written its own before.
        pushed = min(d.pushed, d.received)
        common = {
            "item": encode.item,
            "attempt": encode.attempt,
            "encoder": encode.encoder,
            "uuid": d.mm_hash,
        }
        points = [round(t - trace.started_at, 6) for t in (pushed, d.received, d.initiated, d.complete)]
        self._added.setdefault(trace.id, []).extend(
            (
                Span(kind="push", start=points[0], end=points[1], **common),  # type: ignore[arg-type]
                Span(kind="wait", start=points[1], end=points[2], **common),  # type: ignore[arg-type]
                Span(kind="pull", start=points[2], end=points[3], **common),  # type: ignore[arg-type]
            )
        )

    def _show(self, trace: Trace) -> None:
        added = self._added.get(trace.id)
        shown = msgspec.structs.replace(trace, spans=(*trace.spans, *added)) if added else trace
        for gone in self._board.trace(shown):
            self._added.pop(gone, None)
            self.open.discard(gone)
            forgotten = self._plain.pop(gone, None)
            for span in forgotten.spans if forgotten else ():
                if self._by_uuid.get(span.uuid) == gone:
                    del self._by_uuid[span.uuid]

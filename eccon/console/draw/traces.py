"""The list of requests: one line each, newest first; figures in seconds."""

from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from eccon.console.draw import figures
from eccon.console.draw.columns import Column, choose, heading, row
from eccon.console.draw.marks import status
from eccon.console.draw.text import Line, Part, clean, fit
from eccon.model import Span, Trace

__all__ = ["Layout", "Stages", "Words", "matches", "stages", "words_of"]


class Stages(msgspec.Struct, frozen=True):
    """Where a request spent its time, in seconds; None where nothing is known."""

    queue: float | None
    encode: float | None
    """Of the slowest item, all its attempts."""
    gate: float | None
    transfer: float | None
    """Of the slowest item: push + pull."""
    encoders: int
    attempts: int
    """Attempts that did not end well."""


def _sum(spans: Iterable[Span]) -> float | None:
    whole = [s.end - s.start for s in spans if s.end is not None]
    return sum(whole) if whole else None


def stages(trace: Trace) -> Stages:
    """The stretches of a trace, summed up."""
    encodes: dict[int | None, float] = {}
    moves: dict[str, float] = {}
    names = set()
    lost = 0
    for span in trace.spans:
        if span.kind == "encode":
            names.add(span.encoder)
            lost += span.outcome != "ok"
            if span.end is not None:
                encodes[span.item] = encodes.get(span.item, 0.0) + span.end - span.start
        elif span.kind in ("push", "pull") and span.end is not None:
            moves[span.uuid] = moves.get(span.uuid, 0.0) + span.end - span.start
    return Stages(
        queue=_sum(s for s in trace.spans if s.kind == "queue"),
        encode=max(encodes.values(), default=None),
        gate=_sum(s for s in trace.spans if s.kind == "gate"),
        transfer=max(moves.values(), default=None),
        encoders=len(names),
        attempts=lost,
    )


class Row(msgspec.Struct, frozen=True):
    """A trace, its stages, and the present."""

    trace: Trace
    stages: Stages
    now: float


def _known(value: float | None) -> Part:
    return figures.seconds(value), "text" if value is not None else "dim"


def _total(r: Row) -> Part:
    if r.trace.total_s is not None:
        return figures.seconds(r.trace.total_s), "text"
    return (
        (figures.uptime(max(0.0, r.now - r.trace.started_at)), "busy") if not r.trace.status else ("–", "dim")
    )


def _note(r: Row) -> Part:
    if r.trace.error:
        return clean(r.trace.error), "error"
    if r.trace.status == 499:
        return "client left", "dim"
    if r.stages.attempts:
        return f"{r.stages.attempts} retried", "warn"
    return "", "dim"


def _tokens(r: Row) -> Part:
    n = r.trace.completion_tokens
    return (figures.NONE, "dim") if n is None else (figures.count(n), "text")


COLUMNS: tuple[Column[Row], ...] = (
    Column("time", "time", 8, 1, lambda r: (figures.clock_ms(r.trace.started_at, 0), "dim")),
    Column("mark", "", 1, 0, lambda r: (status(r.trace)[0], status(r.trace)[2])),
    Column("status", "code", 4, 0, lambda r: status(r.trace)[1:]),
    Column("id", "request", 12, 2, lambda r: (clean(r.trace.id), "text")),
    Column(
        "images", "img", 3, 3, lambda r: (str(r.trace.items) if r.trace.items else "–", "text"), right=True
    ),
    Column("encoders", "enc", 3, 11, lambda r: (str(r.stages.encoders or "–"), "dim"), right=True),
    Column("queue", "queue", 6, 10, lambda r: _known(r.stages.queue), right=True),
    Column("encode", "encode", 6, 4, lambda r: _known(r.stages.encode), right=True),
    Column("gate", "gate", 6, 9, lambda r: _known(r.stages.gate), right=True),
    Column("transfer", "xfer", 6, 5, lambda r: _known(r.stages.transfer), right=True),
    Column("ttft", "ttft", 6, 6, lambda r: _known(r.trace.ttft_s), right=True),
    Column("total", "total", 6, 1, _total, right=True),
    Column("tokens", "tok", 5, 7, _tokens, right=True),
)


class Words(msgspec.Struct, frozen=True):
    """What a filter looks at."""

    text: str
    total_s: float


def words_of(trace: Trace) -> Words:
    """Id, status, outcome, model, error and encoders of a request, and how long it took."""
    encoders = dict.fromkeys(s.encoder for s in trace.spans)
    text = " ".join((trace.id, str(trace.status), trace.outcome, trace.model, trace.error, *encoders))
    return Words(text.lower(), trace.total_s or 0.0)


def matches(request: Trace | Words, words: str) -> bool:
    """Whether a request has all words of a filter: of id, status, encoder, model, error; `>1.5` is slower."""
    if not words:
        return True
    known = words_of(request) if isinstance(request, Trace) else request
    for word in words.lower().split():
        if word.startswith(">"):
            try:
                least = float(word[1:].rstrip("s") or 0)
            except ValueError:
                return False
            if known.total_s <= least:
                return False
        elif word not in known.text:
            return False
    return True


class Layout:
    """The columns for a width; lines are drawn one by one, since few of a long list are ever seen."""

    def __init__(self, width: int, now: float) -> None:
        name = 20 if width >= 130 else 16 if width >= 72 else 12
        wide = [msgspec.structs.replace(c, width=name) if c.key == "id" else c for c in COLUMNS]
        self._columns = choose(wide, width - (13 if width >= 84 else 0))
        self._room = width - sum(c.width + 1 for c in self._columns) - 1
        self._now = now
        self.heading = heading(self._columns)

    def line(self, trace: Trace) -> Line:
        """The line of one request."""
        item = Row(trace, stages(trace), self._now)
        line = row(self._columns, item)
        if self._room >= 6:
            text, tone = _note(item)
            if text:
                line = [*line, ("  ", "text"), (fit(text, self._room), tone)]
        return line

    def rows(self, traces: Iterable[Trace]) -> list[tuple[str, Callable[[], Line]]]:
        """(id, how to draw its line) of each request, in the order given."""
        return [(t.id, partial(self.line, t)) for t in traces]

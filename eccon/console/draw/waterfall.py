"""One request as a waterfall: a row for every item and attempt on a common time axis."""

from collections.abc import Iterable

import msgspec

from eccon.console.draw import figures
from eccon.console.draw.marks import status
from eccon.console.draw.text import Line, clean, fit, fit_line, line_width
from eccon.model import LogEvent, Span, Trace

__all__ = ["WaterRow", "head", "rows", "span_lines"]

GLYPHS = {
    "queue": ("·", "dim"),
    "encode": ("━", "encode"),
    "push": ("═", "move"),
    "wait": ("┄", "dim"),
    "pull": ("═", "move"),
    "gate": ("╌", "gate"),
    "pd": ("━", "pd"),
    "stream": ("─", "stream"),
}


FIGURES = ("encode", "push", "wait", "pull", "transfer")
ALL_MOVES, IN_SUM = (0, 1, 2, 3), (0, 4)
"""The figures of an item that a wide terminal shows, and a narrow one: the transfer is push + pull."""
FIGURE_WIDTH = 9
WIDE = 110


class WaterRow(msgspec.Struct, frozen=True):
    """One row: its label, the spans drawn on it, and a note at the right."""

    label: str
    who: str
    spans: tuple[Span, ...]
    note: str
    tone: str = "text"
    uuid: str = ""
    took: tuple[str, ...] = ()
    """Of an item, in place of a note: what FIGURES names."""
    at: float | None = None
    """Of an event: when, in seconds from the request's begin."""


def _took(span: Span) -> str:
    return figures.NONE if span.end is None else f"{figures.seconds(span.end - span.start)} s"


def _short(*spans: Span | None) -> str:
    """How long they took together, in the unit that suits; a dash while one is not known."""
    total = 0.0
    for span in spans:
        if span is None or span.end is None:
            return figures.NONE
        total += span.end - span.start
    return f"{figures.ms(total * 1000)} ms" if total < 0.9995 else f"{figures.seconds(total)} s"


def _item_row(encode: Span, moves: dict[str, Span], first: bool) -> WaterRow:
    label = f"image {(encode.item or 0) + 1}" if first else ""
    who = clean(encode.encoder)
    if encode.outcome != "ok":
        word = {"timeout": "timed out", "cancelled": "cancelled", "error": "failed"}[encode.outcome]
        detail = f": {clean(encode.error)}" if encode.error else ""
        return WaterRow(
            label, who, (encode,), f"✗ {word} after {_took(encode)}{detail}", "error", encode.uuid
        )
    push, wait, pull = (moves.get(kind) for kind in ("push", "wait", "pull"))
    took = (
        "encoding" if encode.end is None else _short(encode),
        *(_short(span) for span in (push, wait, pull)),
        _short(push, pull),
    )
    spans = (encode, *(s for s in (push, wait, pull) if s is not None))
    return WaterRow(label, who, spans, "", "text", encode.uuid, took)


def _events(trace: Trace, events: Iterable[LogEvent], until: float) -> list[WaterRow]:
    """What happened meanwhile to the encoders of this request: ejections, stalls, deaths."""
    met = {s.encoder for s in trace.spans if s.kind == "encode"}
    end = trace.started_at + until
    return [
        WaterRow("event", clean(e.subject), (), f"▲ {clean(e.text)}", "warn", at=e.at - trace.started_at)
        for e in events
        if e.severity != "info" and e.subject in met and trace.started_at <= e.at <= end
    ]


def rows(trace: Trace) -> list[WaterRow]:
    """The rows of a trace, in the order in which things happen."""
    out: list[WaterRow] = []
    by_kind: dict[str, list[Span]] = {}
    moves: dict[str, dict[str, Span]] = {}
    for span in trace.spans:
        if span.kind in ("push", "wait", "pull"):
            moves.setdefault(span.uuid, {})[span.kind] = span
        else:
            by_kind.setdefault(span.kind, []).append(span)
    out += [WaterRow("queue", "", (s,), _took(s)) for s in by_kind.get("queue", ())]
    encodes = sorted(by_kind.get("encode", ()), key=lambda s: (s.item or 0, s.attempt, s.start))
    seen: int | None = -1
    for encode in encodes:
        out.append(_item_row(encode, moves.get(encode.uuid, {}) if encode.uuid else {}, encode.item != seen))
        seen = encode.item
    for span in by_kind.get("gate", ()):
        slowest = max((s for s in encodes if s.end is not None), key=lambda s: s.end or 0.0, default=None)
        who = "" if slowest is None else f"slowest: {(slowest.item or 0) + 1}"
        out.append(WaterRow("gate", who, (span,), _took(span)))
    for span in by_kind.get("pd", ()):
        bad = span.outcome != "ok"
        note = f"✗ {clean(span.error) or span.outcome}" if bad else f"first byte after {_took(span)}"
        out.append(WaterRow("PD", clean(span.encoder), (span,), note, "error" if bad else "text"))
    for span in by_kind.get("stream", ()):
        bad = span.outcome != "ok"
        tokens = "" if trace.completion_tokens is None else f"  {trace.completion_tokens} tokens"
        rate = ""
        if trace.completion_tokens and span.end is not None and span.end > span.start:
            rate = f"  {trace.completion_tokens / (span.end - span.start):.0f}/s"
        note = f"✗ {clean(span.error) or span.outcome}" if bad else f"{_took(span)}{tokens}{rate}"
        out.append(WaterRow("stream", "", (span,), note, "error" if bad else "text"))
    return out


def head(trace: Trace, width: int, now: float) -> list[Line]:
    """Two lines: what it was, what came of it."""
    mark, word, tone = status(trace)
    total = (
        f"{figures.seconds(trace.total_s)} s"
        if trace.total_s is not None
        else figures.uptime(now - trace.started_at)
    )
    images = f"{trace.items} image{'s' if trace.items != 1 else ''}" if trace.items else "text only"
    above: Line = [
        (f"{mark} {word} ", tone),
        (f" {clean(trace.id)}", "title"),
        (f"   {images}   {clean(trace.model)}", "text"),
        ("   stream" if trace.stream else "", "dim"),
    ]
    below: Line = [(f"at {figures.clock_ms(trace.started_at)}   total {total}", "text")]
    if trace.ttft_s is not None:
        below.append((f"   first byte {figures.seconds(trace.ttft_s)} s", "text"))
    if trace.completion_tokens is not None:
        below.append((f"   {figures.count(trace.completion_tokens)} tokens", "text"))
    if trace.prompt_tokens is not None:
        below.append((f" (prompt {figures.count(trace.prompt_tokens)})", "dim"))
    if trace.error:
        below.append((f"   {clean(trace.error)}", "error"))
    return [fit_line(above, width), fit_line(below, width)]


def _extent(trace: Trace, now: float) -> float:
    ends = [s.end for s in trace.spans if s.end is not None]
    last = max(ends, default=0.0)
    if trace.total_s is not None:
        return max(trace.total_s, last, 0.001)
    return max(now - trace.started_at, last, 0.001)


def _axis(extent: float, label: int, cells: int) -> Line:
    """Tick labels at round times, at least 12 cells apart."""
    step = 1e-3
    for step in sorted(b * k for b in (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0) for k in (1, 2, 5)):
        if cells * step / extent >= 11:
            break
    chars = [" "] * cells
    n = 0
    while n * step <= extent:
        x = round(n * step / extent * (cells - 1))
        text = f"{n * step * 1000:.0f} ms" if step < 0.1 else f"{n * step:.10g} s"
        if x + len(text) <= cells:
            chars[x : x + len(text)] = text
        n += 1
    return [(" " * label, "text"), ("".join(chars), "dim")]


def _bars(row: WaterRow, extent: float, cells: int) -> Line:
    chars = [" "] * cells
    tones = ["text"] * cells
    began: tuple[int, str, str] | None = None
    if row.at is not None:
        x = min(max(round(row.at / extent * (cells - 1)), 0), cells - 1)
        chars[x], tones[x] = "▲", "warn"
    for span in row.spans:
        glyph, tone = GLYPHS[span.kind]
        if span.outcome != "ok":
            glyph, tone = "╍", "error"
        end = extent if span.end is None else span.end
        a = min(max(round(span.start / extent * (cells - 1)), 0), cells - 1)
        b = min(max(round(end / extent * (cells - 1)), a), cells - 1)
        for x in range(a, b + 1):
            chars[x], tones[x] = glyph, tone
        if span.kind == "encode" and span.outcome == "ok" and span.end is not None:
            began = a, glyph, tone
        if span.outcome != "ok":
            chars[b] = "╳"
        elif span.end is None:
            chars[b] = "▸"
    if began is not None:  # a short encode is seen all the same
        chars[began[0]], tones[began[0]] = began[1:]
    line: Line = []
    for char, tone in zip(chars, tones, strict=True):
        if line and line[-1][1] == tone:
            line[-1] = (line[-1][0] + char, tone)
        else:
            line.append((char, tone))
    return line


def _columns(texts: Iterable[str]) -> str:
    return "".join(fit(text, FIGURE_WIDTH, right=True) for text in texts)


def span_lines(
    trace: Trace, width: int, now: float, events: Iterable[LogEvent] = ()
) -> list[tuple[str, Line]]:
    """The axis (key "") and a line for each row (key: its encode's uuid or its label).

    `events`: the cluster's history; what befell the request's encoders meanwhile gets a line too.
    """
    all_rows = rows(trace)
    happened = _events(trace, events, _extent(trace, now))
    gate = next((i for i, r in enumerate(all_rows) if r.label in ("gate", "PD")), len(all_rows))
    all_rows[gate:gate] = happened
    narrow = width < 70
    who = 0 if narrow else min(max((len(r.who) for r in all_rows), default=0), 14)
    label = min(max((len(r.label) for r in all_rows), default=5), 10) + (who + 2 if who else 1) + 1
    shown = ALL_MOVES if width >= WIDE else IN_SUM
    least = FIGURE_WIDTH * len(shown) if any(r.took for r in all_rows) else 0
    longest = max((len(r.note) for r in all_rows), default=0)
    note = min(max(longest, least), max(width - label - 24, 0), width // 3) if width >= 40 else 0
    cells = max(width - label - (note + 2 if note else 0), 8)
    extent = _extent(trace, now)
    axis = _axis(extent, label, cells)
    if note and least:
        axis += [("  ", "text"), (fit(_columns([FIGURES[i] for i in shown]), note), "dim")]
    out: list[tuple[str, Line]] = [("", fit_line(axis, width))]
    for row in all_rows:
        text = _columns([row.took[i] for i in shown]) if row.took else row.note
        left = fit(row.label, label - (who + 2 if who else 1) - 1)
        line: Line = [(left + " ", "text")]
        if who:
            line.append((fit(row.who, who) + "  ", "error" if row.tone == "error" else "dim"))
        line += [(" " * (label - line_width(line)), "text"), *_bars(row, extent, cells)]
        if note:
            line += [("  ", "text"), (fit(text, note), row.tone if row.tone != "text" else "dim")]
        out.append((row.uuid or row.label, fit_line(line, width)))
    return out

"""Alarms and the cluster's history as lines."""

from eccon.console.draw import figures
from eccon.console.draw.marks import severity
from eccon.console.draw.text import Line, clean, fit, line_width
from eccon.model import Alarm, LogEvent

__all__ = ["alarm", "event"]


def alarm(
    item: Alarm,
    width: int,
    now: float,
    keys: dict[str, str],
    acknowledged: bool = False,
    chosen: str | None = None,
) -> Line:
    """One alarm: what, when it will be too late, since when, and the key that helps.

    `chosen`: the process that keys act on now; for another one the key that goes there comes first.
    """
    mark, tone = severity(item.severity)
    if acknowledged:
        tone = "dim"
    line: Line = [(f" {mark} ", tone), (clean(item.subject), tone), (f": {clean(item.text)}", "text")]
    tail: Line = [(f" {figures.uptime(now - item.since)} ", "dim")]
    if item.due is not None:
        tail = [(f" in {max(0, round(item.due - now))} s it exits ", "dim" if acknowledged else "bad"), *tail]
    if key := keys.get(item.help):
        if chosen is not None and item.subject not in (chosen, "cluster") and "attend" in keys:
            tail.append((f" {keys['attend']}", "key"))
        tail += [(f" {key} ", "key"), (f"{item.help} ", "hint")]
    room = width - line_width(tail)
    return [*_cut(line, room), *tail] if room > 12 else _cut(line, width)


def event(item: LogEvent, width: int) -> Line:
    """One line of history."""
    mark, tone = severity(item.severity)
    head: Line = [
        (f"{figures.clock_ms(item.at, 0)} ", "dim"),
        (f"{mark} ", tone),
        (fit(clean(item.subject), 11) + " ", "text" if tone == "dim" else tone),
    ]
    room = width - line_width(head)
    if room < 8:
        return _cut([(f"{mark} ", tone), (clean(item.text), "text")], width)
    return [*head, (fit(clean(item.text), room), "dim" if tone == "dim" else "text")]


def _cut(line: Line, width: int) -> Line:
    out: Line = []
    for text, tone in line:
        room = width - line_width(out)
        if room <= 0:
            break
        out.append((fit(text, min(room, line_width([(text, tone)]))), tone))
    if (rest := width - line_width(out)) > 0:
        out.append((" " * rest, "text"))
    return out

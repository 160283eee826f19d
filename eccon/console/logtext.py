"""Log lines for the screen: colours kept as tokens, other control sequences made visible; levels, times."""

import re
import time
from functools import lru_cache

from eccon.console.draw.text import Line, clean

__all__ = ["LEVELS", "LINE_MAX", "level_of", "parse", "strip_sgr", "time_of"]

LINE_MAX = 20_000
"""Characters of a line that are kept; what is cut is said at its end."""

LEVELS = ("all", "info", "warning", "error")

_SGR = re.compile("\x1b\\[([0-9;]*)m")
_LEVEL = re.compile(r"\b(TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b")
_RANK = {"TRACE": 0, "DEBUG": 0, "INFO": 1, "WARN": 2, "WARNING": 2, "ERROR": 3, "CRITICAL": 3, "FATAL": 3}

_COLOURS = {
    f"{base}{n}": tone
    for base in (3, 9)
    for n, tone in enumerate(("dim", "bad", "ok", "warn", "accent", "second", "busy", "text"))
}


def strip_sgr(text: str) -> str:
    """`text` without colour sequences; others stay."""
    return _SGR.sub("", text)


def level_of(text: str) -> int:
    """0 debug or nothing, 1 info, 2 warning, 3 error: the first level word near the beginning."""
    found = _LEVEL.search(text[:160])
    return _RANK[found[1]] if found else (3 if text.startswith("Traceback ") else 0)


_TIME = re.compile(
    r"(?<!\d)(?:(?P<epoch>1\d{9}\.\d{3,6})|(?:(?P<year>20\d\d)-)?(?P<day>\d\d-\d\d)[ T]"
    r"(?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,6}))?)"
)


def time_of(text: str, now: float) -> float | None:
    """The Unix time that a line gives near its beginning; None when it gives none.

    Understood: seconds since 1970 with a fraction, `2026-11-29 21:43:34,567` and vLLM's `11-29 21:43:34`,
    both in local time. A day without a year is the last one before `now`.
    """
    found = _TIME.search(text[:120])
    if found is None:
        return None
    if found["epoch"]:
        return float(found["epoch"])
    fraction = float(f"0.{found['part']}") if found["part"] else 0.0
    year = int(found["year"] or time.localtime(now).tm_year)
    at = _local(year, found["day"], found["clock"])
    if at is not None and not found["year"] and at > now + 86_400:
        at = _local(year - 1, found["day"], found["clock"])
    return None if at is None else at + fraction


@lru_cache(1024)
def _local(year: int, day: str, clock: str) -> float | None:
    try:
        return time.mktime(time.strptime(f"{year}-{day} {clock}", "%Y-%m-%d %H:%M:%S"))
    except ValueError:
        return None


@lru_cache(4096)
def _parts(text: str) -> tuple[tuple[str, str], ...]:
    out: list[tuple[str, str]] = []
    tone = "text"
    at = 0
    for match in _SGR.finditer(text):
        if match.start() > at:
            out.append((clean(text[at : match.start()]), tone))
        for code in match[1].split(";"):
            if code in ("", "0", "39"):
                tone = "text"
            elif code == "2":
                tone = "dim"
            elif code in _COLOURS:
                tone = _COLOURS[code]
        at = match.end()
    if at < len(text):
        out.append((clean(text[at:]), tone))
    return tuple(out)


def parse(text: str) -> Line:
    """A line in tokens. Lines without colours of their own get their level's."""
    if len(text) > LINE_MAX:
        text = text[:LINE_MAX] + f" … {len(text) - LINE_MAX} more characters"
    parts = list(_parts(text))
    if all(tone == "text" for _, tone in parts):
        tone = ("text", "text", "warn", "error")[level_of(text)]
        return [(t, tone) for t, _ in parts]
    return parts

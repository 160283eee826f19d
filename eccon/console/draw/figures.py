"""Figures as short text of a stable width, coarse enough not to flicker."""

import time

__all__ = [
    "bar",
    "clock",
    "clock_ms",
    "count",
    "gib",
    "half",
    "ms",
    "pair_ms",
    "percent",
    "rate",
    "seconds",
    "spark",
    "uptime",
]

NONE = "–"
BLOCKS = " ▁▂▃▄▅▆▇█"


def count(n: int | None) -> str:
    """1204 → "1,204"; from 100,000 on in k, M."""
    if n is None:
        return NONE
    if n < 100_000:
        return f"{n:,}"
    if n < 10_000_000:
        return f"{n // 1000:,}k"
    return f"{n // 1_000_000:,}M"


def percent(p: float | None) -> str:
    """CPU of a tree in steps of 5, so that noise is not redrawn."""
    return NONE if p is None else f"{round(p / 5) * 5}%"


def gib(n: int | None) -> str:
    """Bytes with one decimal below 10 of a unit: "713M", "6.2G"."""
    if n is None:
        return NONE
    if n < 1000 * 2**20:
        return f"{round(n / 2**20)}M"
    g = n / 2**30
    return f"{g:.1f}G" if g < 100 else f"{g:.0f}G"


def uptime(s: float | None) -> str:
    """Seconds below a minute, then two units at most: "31s", "4m", "2h03m", "3d04h"."""
    if s is None or s < 0:
        return NONE
    n = int(s)
    if n < 60:
        return f"{n}s"
    if n < 3600:
        return f"{n // 60}m"
    if n < 86400:
        return f"{n // 3600}h{n % 3600 // 60:02}m"
    days = n // 86400
    return f"{days}d{n % 86400 // 3600:02}h" if days < 100 else f"{days}d"


def seconds(s: float | None) -> str:
    """A duration in seconds without unit: "0.03", "1.42", "12.4", "340"."""
    if s is None:
        return NONE
    if s < 9.995:
        return f"{max(s, 0):.2f}"
    return f"{s:.1f}" if s < 99.95 else f"{s:.0f}"


def ms(value: float | None) -> str:
    """Milliseconds without unit, two digits that matter: "0.4", "12", "830", "12.4k"."""
    if value is None:
        return NONE
    if value < 9.95:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 9_999.5 else f"{value / 1000:.1f}k"


def pair_ms(p50: float | None, p99: float | None) -> str:
    """ "12/31 ms", or in seconds when the larger one passes one second: "0.8/1.4 s"."""
    if p50 is None or p99 is None:
        return NONE
    if p99 >= 1000:
        return f"{p50 / 1000:.1f}/{p99 / 1000:.1f} s"
    return f"{ms(p50)}/{ms(p99)} ms"


def rate(r: float) -> str:
    """Per second: "0", "0.4", "3.2", "25", "1.2k"."""
    if r < 0.05:
        return "0"
    if r < 9.95:
        return f"{r:.1f}"
    return f"{r:.0f}" if r < 1000 else f"{r / 1000:.1f}k"


def clock(at: float) -> str:
    """Local wall clock to the minute; the minute is the step that costs no bytes."""
    return time.strftime("%H:%M", time.localtime(at))


def clock_ms(at: float, decimals: int = 3) -> str:
    """Local wall clock of an event: "14:02:10.412"."""
    whole = time.strftime("%H:%M:%S", time.localtime(at))
    if not decimals:
        return whole
    return f"{whole}.{int(at % 1 * 10**decimals):0{decimals}}"


def bar(fraction: float, width: int) -> str:
    """A thin bar of at most `width` cells, in halves of a cell."""
    if width <= 0:
        return ""
    full, rest = divmod(round(min(max(fraction, 0.0), 1.0) * width * 2), 2)
    return ("━" * full + "╸" * rest).ljust(width)


def half(fraction: float, width: int) -> tuple[str, str]:
    """A progress bar's filled and its empty part."""
    full = round(min(max(fraction, 0.0), 1.0) * width)
    return "━" * full, "─" * (width - full)


def spark(values: list[float], width: int, top: float | None = None) -> str:
    """The last `width` values as blocks, right-aligned; `top` is the value of a full block."""
    shown = values[-width:]
    peak = max(shown, default=0.0) if top is None else top
    cells = []
    for value in shown:
        level = 0 if value <= 0 or peak <= 0 else max(1, round(min(value / peak, 1.0) * 8))
        cells.append(BLOCKS[level])
    return "".join(cells).rjust(width)

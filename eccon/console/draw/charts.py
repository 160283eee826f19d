"""The charts of a cluster, each with its title and the figures of now."""

import msgspec

from eccon.console.draw import figures
from eccon.console.draw.flow import chart
from eccon.console.draw.text import Line, fit_line
from eccon.console.history import History
from eccon.model import ClusterState

__all__ = ["PANELS", "Panel", "grid", "title"]

LEAST_HEIGHT = 3
LEAST_WIDTH = 36


class Panel(msgspec.Struct, frozen=True):
    """One chart: its name, its title, and its series, the one in front first."""

    name: str
    title: str
    series: tuple[tuple[str, str], ...]


PANELS = (
    Panel("requests", "Requests/s", (("requests", "bar"),)),
    Panel("ttft", "First byte ms", (("ttft", "bar"), ("ttft99", "frame"))),
    Panel("transfer", "Transfer ms", (("transfer", "bar"), ("transfer99", "frame"))),
    Panel("items", "Fan-out items/s", (("items", "bar"),)),
    Panel(
        "queue", "Queued, encoding, staged", (("queued", "warn"), ("encoding", "bar"), ("staged", "frame"))
    ),
    Panel("tokens", "Tokens/s", (("tokens", "bar"),)),
)


def title(panel: Panel, state: ClusterState, history: History) -> str:
    """A panel's title with what is now."""
    info = state.cluster
    if panel.name == "ttft":
        return f"{panel.title}  {figures.pair_ms(info.ttft.p50, info.ttft.p99)}" if info.ttft else panel.title
    if panel.name == "transfer":
        t = info.transfer
        return f"{panel.title}  {figures.pair_ms(t.total.p50, t.total.p99)}" if t else panel.title
    now = [(history.get(key).last(1) or [0.0])[0] for key, _ in panel.series]
    if panel.name == "queue":
        return f"{panel.title}  " + " ".join(f"{value:.0f}" for value in now)
    return f"{panel.title}  {figures.rate(now[0])}"


def grid(state: ClusterState, history: History, width: int, height: int, window: int) -> list[Line]:
    """All charts side by side and below each other, as many as have room for three lines."""
    across = max(1, min(3, width // LEAST_WIDTH))
    down = -(-len(PANELS) // across)
    while down > 1 and height // down < LEAST_HEIGHT:
        down -= 1
    tall = max(height // down, 1)
    wide = (width - across + 1) // across
    lines: list[Line] = []
    for y in range(down):
        shown = PANELS[y * across : (y + 1) * across]
        block: list[Line] = [[] for _ in range(tall)]
        for x, panel in enumerate(shown):
            parts = [[(f" {title(panel, state, history)}", "title")]]
            if tall > 1:
                parts += chart(history, panel.series, wide, tall - 1, window)
            for line, part in zip(block, parts, strict=False):
                line += [*([(" ", "text")] if x else []), *fit_line(part, wide)]
        lines += block
    return [fit_line(line, width) for line in lines[:height]]

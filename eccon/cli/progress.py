"""How far processes are, on stderr: a table that changes in place on a terminal, else a line a step."""

import sys
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from eccon.cli.common import narrate
from eccon.model import Process

if TYPE_CHECKING:
    from rich.live import Live

__all__ = ["Progress"]

BAR = 20


class Progress:
    """Shows the states given to `show`; used as a context. What was shown last stays on the screen."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[str, str]] = {}
        self._live: Live | None = None

    def __enter__(self) -> "Progress":  # noqa: PYI034  Self is 3.11
        if sys.stderr.isatty():
            # rich is not cheap to import, and only a terminal has a use for it.
            from rich.console import Console  # noqa: PLC0415
            from rich.live import Live  # noqa: PLC0415

            console = Console(stderr=True, highlight=False, markup=False, emoji=False)
            self._live = Live(console=console, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, processes: Iterable[Process]) -> None:
        """Their present state; nothing is written where nothing changed."""
        rows = [(p, _step(p)) for p in processes]
        if self._live is not None:
            from rich.text import Text  # noqa: PLC0415

            self._live.update(Text("\n".join(_row(p, step) for p, step in rows)))
            return
        for p, step in rows:
            if self._shown.get(p.name) != (p.state.value, step):
                self._shown[p.name] = (p.state.value, step)
                narrate(f"{p.name:<12} {p.state.value:<9} {step}".rstrip())


def _step(p: Process) -> str:
    """The milestone's text while it starts, else why it is in its state."""
    starting = p.milestone is not None and p.state.value in ("starting", "loading")
    return p.milestone.text if p.milestone is not None and starting else p.reason


def _row(p: Process, step: str) -> str:
    if p.milestone is None or p.state.value not in ("starting", "loading"):
        return f"{p.name:<12} {p.state.value:<9} {step}".rstrip()
    done = round(p.milestone.fraction * BAR)
    eta = f"  ~{p.milestone.eta_s:.0f} s" if p.milestone.eta_s else ""
    bar = "█" * done + "░" * (BAR - done)
    return f"{p.name:<12} {p.state.value:<9} {bar} {p.milestone.fraction:>4.0%}{eta}  {step}"

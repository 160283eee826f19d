"""What the overview has room for at a size of the terminal. The styles know the same words as classes."""

from collections.abc import Iterable

import msgspec

from eccon.model import Process

__all__ = ["LEAST_HEIGHT", "LEAST_WIDTH", "Shape"]

LEAST_WIDTH, LEAST_HEIGHT = 32, 8
ROOMY_HEIGHT = 28
CHARTS_WIDTH, CHARTS_HEIGHT = 108, 28
WIDE = 150
MORE_HEIGHT = 40
"""From here on there is a second row of charts."""
EVENTS_BELOW = 38
ALARMS = 3


class Shape(msgspec.Struct, frozen=True):
    """The size, and whether charts are wanted at all."""

    width: int
    height: int
    low_bandwidth: bool = False

    @property
    def small(self) -> bool:
        """Too small for anything."""
        return self.width < LEAST_WIDTH or self.height < LEAST_HEIGHT

    @property
    def header(self) -> int:
        """Lines of the header."""
        return 2 if self.height >= ROOMY_HEIGHT else 1

    @property
    def boxed(self) -> bool:
        """Panels have a frame, not only a line above."""
        return self.width >= 100 and self.height >= 26

    @property
    def charts(self) -> bool:
        """There is a row of charts."""
        return self.width >= CHARTS_WIDTH and self.height >= CHARTS_HEIGHT and not self.low_bandwidth

    @property
    def wide(self) -> bool:
        """The table has room for the line of detail, and the row of charts for one more."""
        return self.charts and self.width >= WIDE

    @property
    def more(self) -> bool:
        """There is a second row of charts."""
        return self.wide and self.height >= MORE_HEIGHT

    @property
    def beside(self) -> bool:
        """Events are beside the requests."""
        return self.width >= WIDE

    @property
    def below(self) -> bool:
        """Events are below the requests."""
        return not self.beside and self.height >= EVENTS_BELOW

    @property
    def short(self) -> bool:
        """Only the table and the alarms."""
        return self.height < 14

    @property
    def alarms(self) -> int:
        """Lines of alarms at most."""
        return 1 if self.height < 26 else ALARMS

    def classes(self) -> dict[str, bool]:
        """The words of the styles."""
        names = ("boxed", "charts", "wide", "more", "beside", "below", "short")
        return {f"-{name}": getattr(self, name) for name in names}

    def table(self, shown: Iterable[Process]) -> int:
        """Lines of the panel of processes, its frame included."""
        rows = sum(1 for _ in shown)
        frame = 2 if self.boxed else 1
        share = max(4, self.height * (55 if self.height < 30 else 45) // 100)
        most = self.height - 3 if self.short else share
        return min(max(rows, 1) + 1 + frame, max(most, 3))

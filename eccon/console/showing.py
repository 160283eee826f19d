"""What the app draws, on its way to the terminal: filters, the first frame's end, the painter."""

from collections.abc import Mapping
from typing import Any

from rich.color import ColorSystem
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.driver import Driver
from textual.filter import LineFilter
from textual.screen import Screen

from eccon.console import filters, themes
from eccon.console.crash import Discreet
from eccon.console.driver import ConsoleDriver
from eccon.console.opening import Opening
from eccon.console.paint import Painter
from eccon.console.screens.base import ConsoleScreen
from eccon.console.setup import Setup
from eccon.console.shortcut import Shortcut

__all__ = ["Showing"]


class Showing(Discreet[int]):
    """An app whose frames the painter sends."""

    def __init__(self, ready: Setup, opening: Opening | None, environ: Mapping[str, str]) -> None:
        self.opening = opening
        self.no_colours, self.low_bandwidth = ready.no_colours, ready.low_bandwidth
        self.ascii_only = ready.ascii_only
        self._own_filters: list[LineFilter] = []
        if self.no_colours:
            self._own_filters.append(filters.NoColour())
        if ready.ascii_only:
            self._own_filters.append(filters.Ascii())
        self.theme_files = ready.themes
        self.palette = themes.Palette(self.theme_files[ready.theme])
        self.faded = False
        """Whether what is shown is old, and so all of it grey."""
        # A page in a browser (textual-serve) names its own driver.
        super().__init__(driver_class=None if environ.get("TEXTUAL_DRIVER") else ConsoleDriver)
        for file in self.theme_files.values():
            self.register_theme(file.textual())
        self.theme = ready.theme
        self.animation_level = "none"
        system = ColorSystem.TRUECOLOR
        if self.console.color_system in ("256", "standard"):
            system = {"256": ColorSystem.EIGHT_BIT, "standard": ColorSystem.STANDARD}[
                self.console.color_system
            ]
        self.painter = Painter(system) if opening is None else opening.painter
        self.shortcut = Shortcut()
        self._covered = opening is not None
        """Whether the terminal shows the first frame, and nothing of ours that is drawn in full yet."""

    def get_line_filters(self) -> list[LineFilter]:
        """The last step before the terminal."""
        return self._own_filters if self.no_colours else [*super().get_line_filters(), *self._own_filters]

    def draw_screen(self, screen: ConsoleScreen) -> None:
        """Has a screen draw itself; its changed lines take the short way where there is one."""
        driver = self._driver
        if (
            screen is not self.screen
            or not isinstance(driver, ConsoleDriver)
            or driver.busy
            or self._batch_count > 1
            or not self._shows
        ):
            screen.draw()
            return
        self.shortcut.open()
        try:
            screen.draw()
        finally:
            self.painter.resize(*self.size)
            self._write(driver, self.shortcut.close(screen, self.painter))

    def drawn(self) -> None:
        """A screen has drawn all that it shows."""
        if self._covered:
            self.call_after_refresh(self._uncover)

    def _uncover(self) -> None:
        self._covered = False
        self.screen.refresh()

    def _display(self, screen: Screen[Any], renderable: Any) -> None:
        """Sends what differs from what the terminal shows; one that is behind gets a later frame instead."""
        try:
            driver = self._driver
            if renderable is None or self._batch_count or not self._shows:
                return
            if not isinstance(renderable, LayoutUpdate | ChopsUpdate) or driver is None:
                super()._display(screen, renderable)
                return
            if self._behind(driver):
                return
            self.painter.resize(*self.size)
            self._write(driver, self.painter.paint(renderable))
        finally:
            self.post_display_hook()

    @property
    def _shows(self) -> bool:
        """Whether what is drawn goes to the terminal."""
        return self._running and not (self._covered or self._closed or self.is_headless)

    def _write(self, driver: Driver, cells: str) -> None:
        cursor = self.screen.outer_size.clamp_offset(self.cursor_position)
        if cells or cursor != self._previous_cursor_position:
            self._previous_cursor_position = cursor
            self._begin_update()
            driver.write(f"{cells}\x1b[{cursor.y + 1};{cursor.x + 1}H")
            self._end_update()
            driver.flush()

    def _behind(self, driver: Driver) -> bool:
        if not isinstance(driver, ConsoleDriver):
            return False
        if driver.gone:
            self.exit(return_code=129)
            return True
        if driver.busy:
            self.set_timer(0.2, self._again)
            return True
        return False

    def _again(self) -> None:
        self.screen.refresh()

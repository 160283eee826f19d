"""Small previews of images, side by side: as pictures where the terminal draws such, else in half blocks."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from textual.geometry import Size
from textual.selection import Selection

from eccon.console import images, terminal
from eccon.console.draw.text import Line, clean, fit, fit_line
from eccon.console.driver import ConsoleDriver
from eccon.console.widgets.lines import Lines

if TYPE_CHECKING:
    from PIL.Image import Image

    from eccon.console.pictures.answers import Answers
    from eccon.console.pictures.gallery import Gallery, Key

__all__ = ["COUNT_MAX", "Previews"]

COUNT_MAX = 8


class Previews(Lines):
    """Shows the files it is given; a file is read in a thread, and its name is shown when it is no image."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._names: list[str] = []
        self._columns = self._rows = 0
        self._thumbnails: dict[str, Image | None] = {}
        self._gallery: Gallery | None = None
        self._kept: set[Key] = set()
        self._asked_at: Size | None = None

    def on_mount(self) -> None:
        """The terminal is asked what it can draw only now that there may be something to draw."""
        app = self.console_app
        driver = app._driver
        if not app.previews or not isinstance(driver, ConsoleDriver):
            return  # a page in a browser, or no terminal at all
        from eccon.console.pictures.easel import Easel  # noqa: PLC0415  not before there is something to draw
        from eccon.console.pictures.gallery import Gallery  # noqa: PLC0415

        if app.painter.easel is None:
            app.painter.easel = Easel(Gallery(app.settings.images, app.environ))
        self._gallery = app.painter.easel.gallery
        driver.farewell = self._gallery.farewell
        self._ask()

    def on_unmount(self) -> None:
        """Nothing of the pictures stays in the terminal's memory."""
        if self._gallery is not None:
            self._write(self._gallery.keep(()))

    def on_resize(self) -> None:
        """With another font the cells are of another size."""
        if self.app.size != self._asked_at:
            self._ask()

    def _ask(self) -> None:
        driver = self.app._driver
        if self._gallery is not None and self._gallery.asks and isinstance(driver, ConsoleDriver):
            self._asked_at = self.app.size
            self._answered(driver.ask(self._answered))

    @property
    def loading(self) -> bool:
        """Whether a file is still being read."""
        return any(name not in self._thumbnails for name in self._names)

    def put(self, names: list[str], columns: int, rows: int) -> None:
        """Shows these files in at most so many cells each; with the same as before nothing happens."""
        names = names[:COUNT_MAX] if rows else []
        if (names, columns, rows) == (self._names, self._columns, self._rows):
            return
        self._names, self._columns, self._rows = names, columns, rows
        self.styles.height = rows if names else 0
        self._thumbnails = {name: self._thumbnails[name] for name in names if name in self._thumbnails}
        self._draw()
        self._reload()

    def _reload(self) -> None:
        self.run_worker(self._load(self._names), group="previews", exclusive=True)

    async def _load(self, names: list[str]) -> None:
        for name in dict.fromkeys(names):
            thumbnail = await asyncio.to_thread(images.thumbnail, name)
            if self._gallery is not None and thumbnail is not self._thumbnails.get(name, thumbnail):
                self._write(self._gallery.keep({k for k in self._kept if k[0] != name}))
            self._thumbnails[name] = thumbnail
            key = name, self._columns, self._rows
            if self._gallery is not None and thumbnail is not None and self._gallery.get(key) is None:
                self._gallery.put(key, await asyncio.to_thread(self._gallery.made, key, thumbnail))
            self._draw()

    def _answered(self, answers: "Answers") -> None:
        """The terminal has said something: pictures take the place of half blocks, or are of another size."""
        driver = self.app._driver
        if self._gallery is None or not isinstance(driver, ConsoleDriver) or not self.is_attached:
            return
        cell = answers.cell or terminal.cell_pixels(driver.fileno)
        self._write(self._gallery.take(replace(answers, cell=cell)))
        self._draw()
        self._reload()

    def get_selection(self, selection: Selection) -> tuple[str, str]:  # noqa: ARG002  Textual's signature
        """A picture is no text."""
        return "", ""

    def _write(self, text: str) -> None:
        driver = self.app._driver
        if text and driver is not None:
            driver.write(text)
            driver.flush()

    def _draw(self) -> None:
        self._kept = set()
        lines: list[Line] = [[] for _ in range(self._rows if self._names else 0)]
        for name in self._names:
            preview = self._preview(name)
            for y, line in enumerate(lines):
                line += [*fit_line(preview[y] if y < len(preview) else [], self._columns), (" ", "text")]
        self.show(lines)
        if self._gallery is not None:
            self._write(self._gallery.keep(self._kept))

    def _preview(self, name: str) -> list[Line]:
        if name not in self._thumbnails:
            return []
        thumbnail = self._thumbnails[name]
        if thumbnail is None:
            return [[(fit(clean(name.rpartition("/")[2]), self._columns), "dim")]]
        if self._gallery is not None:
            key = (name, self._columns, self._rows)
            self._kept.add(key)
            if (picture := self._gallery.get(key)) is not None:
                return [[(cells, "text")] for cells in picture.lines()]
        return images.half_blocks(thumbnail, self._columns, self._rows)

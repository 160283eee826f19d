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

__all__ = ["Previews"]

COUNT_MAX = 8

ROWS = 3
"""Lines of a preview where there is no room for more beside the others."""

WIDE = 8 / 3
"""Columns of a preview for each of its lines: pictures are about 4:3, cells twice as high as wide."""


class Previews(Lines):
    """Shows the files it is given; a file is read in a thread, and its name is shown when it is no image."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reading = False
        """Whether files are still being read. (`loading` is Textual's word for a cover over the widget.)"""
        self._wanted = ("", 0, 0)
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
        if self._gallery is not None and self._gallery.asks_tmux:
            self.run_worker(self._ask_tmux(), group="tmux", exclusive=True)
        driver = self.app._driver
        if self._gallery is not None and self._gallery.asks and isinstance(driver, ConsoleDriver):
            self._asked_at = self.app.size
            self._answered(driver.ask(self._answered))

    async def _ask_tmux(self) -> None:
        from eccon.console.pictures.tmux import around  # noqa: PLC0415  only there

        self._asked_at = self.app.size
        self._answered(await around(self.console_app.environ))

    def put(self, text: str, rows: int) -> None:
        """Shows the files that a field of the prompt means, in at most so many lines; 0: none.

        With the same as before nothing happens.
        """
        wanted = text, rows, self.size.width
        if wanted != self._wanted:
            self._wanted = wanted
            self._reload()

    def _reload(self) -> None:
        self.reading = True
        self.run_worker(self._load(*self._wanted), group="previews", exclusive=True)

    async def _load(self, text: str, most: int, width: int) -> None:
        names = (await asyncio.to_thread(images.files, text))[:COUNT_MAX] if most else []
        rows = most if width // max(len(names), 1) > most * WIDE else min(most, ROWS)
        self._names, self._columns, self._rows = names, int(rows * WIDE), rows
        self.styles.height = rows if names else 0
        self._thumbnails = {name: self._thumbnails[name] for name in names if name in self._thumbnails}
        self._draw()
        for name in dict.fromkeys(names):
            await self._read(name)
            self._draw()
        self.reading = False

    async def _read(self, name: str) -> None:
        thumbnail = await asyncio.to_thread(images.thumbnail, name)
        gallery = self._gallery
        if gallery is not None and thumbnail is not self._thumbnails.get(name, thumbnail):
            self._write(gallery.keep({k for k in self._kept if k[0] != name}))  # the file is another one now
        self._thumbnails[name] = thumbnail
        key = name, self._columns, self._rows
        if gallery is not None and thumbnail is not None and gallery.get(key) is None:
            gallery.put(key, await asyncio.to_thread(gallery.made, key, thumbnail))

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

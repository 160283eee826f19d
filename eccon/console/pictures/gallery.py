"""The pictures that the terminal shows: their cells and ids, what was sent, what is to be taken away."""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from eccon.console.pictures import cells, encode
from eccon.console.pictures.answers import Answers
from eccon.console.pictures.protocol import Protocol, Setting, asks, choose, in_multiplexer

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Gallery", "Key", "Picture"]

Key: TypeAlias = tuple[str, int, int]
"""Which image, in at most so many columns and rows."""

CELL = (10, 20)
"""Pixels of a cell where the terminal scales the picture to the cells, so that it does not matter much."""

LOW = 16
"""The low byte of the first id, which is a colour: the first sixteen have codes of their own."""

SIDE_MAX = 256
"""Pixels of a side, at most, where the terminal scales the picture."""


@dataclass
class Picture:
    """One picture in the terminal."""

    protocol: Protocol
    cell: tuple[int, int] | None
    """The size of a cell that it was made for."""
    columns: int
    rows: int
    data: str
    """What is sent of it (kitty), or what draws it at the cursor."""
    slot: int = -1
    number: int = 0
    """kitty's id."""
    sent: bool = False

    def lines(self) -> list[str]:
        """Its cells, row by row."""
        return [cells.line(self.slot, row, self.columns) for row in range(self.rows)]


class Gallery:
    """Pictures by what they are of. Nothing is written here: what is to be written is returned."""

    def __init__(self, setting: Setting = "auto", environ: Mapping[str, str] | None = None) -> None:
        self._setting = setting
        self._environ = environ or {}
        self._answers = Answers()
        self._in_tmux = in_multiplexer(self._environ)
        self._pictures: dict[Key, Picture] = {}
        self._slots: dict[int, Picture] = {}
        self._next = 0
        # Pictures of other programs in this terminal have their ids too.
        self._high = random.randrange(1, len(encode.DIACRITICS)) << 24
        self.changed: set[int] = set()
        """Slots whose cells mean another picture than they did; the painter takes them from here."""

    @property
    def protocol(self) -> Protocol:
        """How pictures are drawn at present."""
        return choose(self._setting, self._environ, self._answers)

    @property
    def asks_tmux(self) -> bool:
        """Whether what tmux knows of the terminal around it would matter."""
        return self._setting == "auto" and self._in_tmux

    @property
    def asks(self) -> bool:
        """Whether the terminal's answers would matter."""
        return asks(self._setting, self._environ)

    def take(self, answers: Answers) -> str:
        """What the terminal says of itself. Pictures that are drawn otherwise from now on are dropped."""
        before = self.protocol, self._answers.cell
        self._answers = answers
        return "" if (self.protocol, answers.cell) == before else self.keep(())

    def made(self, key: Key, image: "Image") -> Picture | None:
        """The picture of an image, for `put`; None when half blocks are better. Takes up to a second."""
        protocol, told = self.protocol, self._answers.cell
        if protocol in ("blocks", "off"):
            return None
        columns, rows = min(key[1], cells.COLUMNS_MAX), min(key[2], cells.ROWS_MAX)
        width, height = told or CELL
        scale = min(columns * width / image.width, rows * height / image.height)
        size = max(round(image.width * scale), 1), max(round(image.height * scale), 1)
        columns, rows = min(-(-size[0] // width), columns), min(-(-size[1] // height), rows)
        if protocol == "sixel":
            data = encode.sixel(image.resize(size))
        else:
            shrink = min(1.0, SIDE_MAX / max(size))
            small = image.resize((max(round(size[0] * shrink), 1), max(round(size[1] * shrink), 1)))
            data = encode.kitty(small) if protocol == "kitty" else encode.iterm(small, columns, rows)
        return Picture(protocol, told, columns, rows, data) if data is not None else None

    def put(self, key: Key, picture: Picture | None) -> None:
        """Takes what `made` has made, unless the terminal has said something else of itself since."""
        # In turn, so that a slot just left is not at once another picture's.
        turns = ((self._next + i) % cells.SLOTS for i in range(cells.SLOTS))
        slot = next((s for s in turns if s not in self._slots), None)
        if picture is not None and (picture.protocol, picture.cell) != (self.protocol, self._answers.cell):
            return
        if picture is not None and slot is not None:
            picture.slot, picture.number = slot, self._high | (slot + LOW)
            self._slots[slot] = picture
            self._next = slot + 1
            self.changed.add(slot)
            self._pictures[key] = picture

    def get(self, key: Key) -> Picture | None:
        """The picture that was put."""
        return self._pictures.get(key)

    def keep(self, keys: Collection[Key]) -> str:
        """Drops all pictures but these; what takes them out of the terminal's memory."""
        gone = [self._pictures.pop(key) for key in self._pictures.keys() - set(keys)]
        for picture in gone:
            del self._slots[picture.slot]
            self.changed.add(picture.slot)
        return "".join(map(self._deletion, gone))

    def forget(self) -> None:
        """The terminal has lost what was sent."""
        for picture in self._slots.values():
            picture.sent = False

    def farewell(self) -> str:
        """What leaves no picture in the terminal; one that is drawn again is sent again."""
        out = "".join(map(self._deletion, self._slots.values()))
        self.forget()
        return out

    def _deletion(self, picture: Picture) -> str:
        if picture.protocol != "kitty" or not picture.sent:
            return ""
        return encode.kitty_delete(picture.number, in_tmux=self._in_tmux)

    # For the painter

    @property
    def empty(self) -> bool:
        """Whether there is no picture at all."""
        return not self._slots

    def cell(self, text: str) -> tuple[str, str | None]:
        """What stands in a picture's cell: the characters, and their colour where it matters (SGR)."""
        slot, row, column = cells.place(text)
        picture = self._slots.get(slot)
        if picture is None or picture.protocol != "kitty" or row >= picture.rows or column >= picture.columns:
            return " ", None
        return encode.kitty_cell(picture.number, row, column)

    def sending(self, slot: int) -> str:
        """What has to be written before the cells of the picture, once."""
        picture = self._slots.get(slot)
        if picture is None or picture.protocol != "kitty" or picture.sent:
            return ""
        picture.sent = True
        return encode.kitty_send(
            picture.data, picture.number, picture.columns, picture.rows, in_tmux=self._in_tmux
        )

    def drawn(self, slot: int) -> Picture | None:
        """The picture, when it is drawn over its cells."""
        picture = self._slots.get(slot)
        return picture if picture is not None and picture.protocol != "kitty" else None

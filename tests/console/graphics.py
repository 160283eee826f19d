"""A terminal that draws pictures (kitty's placeholders, sixel, iTerm2's files), and says so when asked."""

import io
import os
import re
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass, field

import pyte
from PIL import Image

from tests.console.terminal import Terminal

__all__ = ["KITTY", "SIXEL", "GraphicsTerminal", "Placed"]

NAME, CELL, ATTRIBUTES = b"\x1b[>q", b"\x1b[16t", b"\x1b[c"
KITTY = {NAME: b"\x1bP>|kitty(0.35.2)\x1b\\", CELL: b"\x1b[6;20;10t", ATTRIBUTES: b"\x1b[?62;c"}
SIXEL = {NAME: b"\x1bP>|foot(1.16.2)\x1b\\", CELL: b"\x1b[6;20;10t", ATTRIBUTES: b"\x1b[?62;4;22c"}

_STRING = re.compile(rb"\x1b(?:(?P<kind>[P_])(?P<text>.*?)\x1b\\|\](?P<osc>1337;.*?)\x07)", re.DOTALL)
_OPEN = re.compile(rb"\x1b(?:[P_][^\x1b]*\x1b?|\](?:[^\x07\x1b]*)?|\[[>\d]*)?\Z")


@dataclass(eq=False)
class Placed:
    """A picture drawn at the cursor."""

    row: int
    column: int
    image: Image.Image
    over: str
    """The text in the cells that it covered."""


@dataclass
class Kept:
    """A picture in kitty's memory."""

    columns: int
    rows: int
    data: bytes = b""
    whole: bool = False

    @property
    def image(self) -> Image.Image:
        assert self.whole
        return Image.open(io.BytesIO(b64decode(self.data)))


@dataclass
class Pictures:
    """What was sent of pictures."""

    kept: dict[int, Kept] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    sent: int = 0
    """Bytes of all picture commands."""
    deleted: list[int] = field(default_factory=list)


class Layered(pyte.Screen):
    """Text written into a cell takes away what a picture has there."""

    layer: dict[tuple[int, int], Placed]

    def draw(self, data: str) -> None:
        for char in data:
            self.layer.pop((self.cursor.y, self.cursor.x), None)
            super().draw(char)


class GraphicsTerminal(Terminal):
    """A terminal with pictures. `answers`: what it says to which question, set before the question comes."""

    answers: dict[bytes, bytes]
    cell = (10, 20)

    def __init__(self, argv: list[str], env: dict[str, str], width: int, height: int) -> None:
        super().__init__(argv, env, width, height)
        self.answers = {}
        self.asked: list[bytes] = []
        self.pictures = Pictures()
        self.on_question: Callable[[bytes], None] = self._reply
        self._open: Kept | None = None
        self._rest = b""
        self.screen = Layered(width, height)
        self.screen.layer = {}
        self._stream = pyte.ByteStream(self.screen)

    @property
    def layer(self) -> dict[tuple[int, int], Placed]:
        """Cell → the picture that lies over it."""
        layer: dict[tuple[int, int], Placed] = self.screen.layer  # type: ignore[attr-defined]
        return layer

    def _reply(self, question: bytes) -> None:
        if question in self.answers:
            os.write(self.master, self.answers[question])

    def feed(self, piece: bytes) -> None:
        data = self._rest + piece
        self._rest = b""
        if incomplete := _OPEN.search(data):
            data, self._rest = data[: incomplete.start()], incomplete[0]
        at = 0
        for match in _STRING.finditer(data):
            self._text(data[at : match.start()])
            at = match.end()
            self._picture(match)
        self._text(data[at:])

    def _text(self, data: bytes) -> None:
        for question in (NAME, CELL, ATTRIBUTES):
            if question in data:
                data = data.replace(question, b"")
                self.asked.append(question)
                self.on_question(question)
        super().feed(data)

    def _picture(self, match: re.Match[bytes]) -> None:
        self.pictures.sent += len(match[0])
        if match["osc"]:
            head, _, data = match["osc"].partition(b":")
            keys = dict(pair.split(b"=") for pair in head.partition(b"File=")[2].split(b";"))
            image: Image.Image = Image.open(io.BytesIO(b64decode(data)))
            assert int(keys[b"size"]) == len(b64decode(data))
            self._place(image, int(keys[b"width"]), int(keys[b"height"]))
        elif match["kind"] == b"P":
            image = decode_sixel(match["text"].decode())
            self._place(image, -(-image.width // self.cell[0]), -(-image.height // self.cell[1]))
        else:
            assert match["text"].startswith(b"G")
            head, _, data = match["text"][1:].partition(b";")
            self._kitty(dict(pair.split("=") for pair in head.decode().split(",")), data)

    def _place(self, image: Image.Image, columns: int, rows: int) -> None:
        y, x = self.screen.cursor.y, self.screen.cursor.x
        cells = [(y + r, x + c) for r in range(rows) for c in range(columns)]
        placed = Placed(y, x, image, "".join(self.screen.buffer[r][c].data for r, c in cells))
        self.pictures.placed.append(placed)
        self.layer.update(dict.fromkeys(cells, placed))

    def _kitty(self, keys: dict[str, str], data: bytes) -> None:
        assert len(data) <= 4096
        assert keys["q"] == "2"
        if keys.get("a") == "d":
            assert keys["d"] == "I"
            self.pictures.deleted.append(int(keys["i"]))
            del self.pictures.kept[int(keys["i"])]
            return
        if self._open is None:
            assert (keys["a"], keys["U"], keys["f"]) == ("T", "1", "100")
            self._open = Kept(int(keys["c"]), int(keys["r"]))
            self.pictures.kept[int(keys["i"])] = self._open
        self._open.data += data
        if keys["m"] == "0":
            self._open.whole = True
            self._open = None

    def placeholders(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """Cell → id, row and column of the picture that is drawn there."""
        from eccon.console.pictures.encode import DIACRITICS

        out = {}
        colours = pyte.graphics.FG_BG_256
        for y in range(self.screen.lines):
            for x in range(self.screen.columns):
                cell = self.screen.buffer[y][x]
                if (
                    cell.data.startswith("\U0010eeee") and len(cell.data) == 4
                ):  # else the rest is still to come
                    row, column, high = (DIACRITICS.index(c) for c in cell.data[1:])
                    out[y, x] = (high << 24 | colours.index(cell.fg, 16), row, column)
        return out


def decode_sixel(text: str) -> Image.Image:
    """The image of sixel data: `q`, raster attributes, colours in percent, runs, bands."""
    body = text.partition("q")[2]
    found = re.match(r'"1;1;(\d+);(\d+)', body)
    assert found
    image = Image.new("RGB", (int(found[1]), int(found[2])))
    palette: dict[int, tuple[int, int, int]] = {}
    x = y = colour = 0
    for part in re.finditer(
        r"#(\d+)(?:;2;(\d+);(\d+);(\d+))?|!(\d+)([?-~])|([?-~])|([$-])", body[found.end() :]
    ):
        if part[1]:
            colour = int(part[1])
            if part[2]:
                palette[colour] = (
                    round(int(part[2]) * 2.55),
                    round(int(part[3]) * 2.55),
                    round(int(part[4]) * 2.55),
                )
        elif part[8]:
            x = 0
            y += 6 if part[8] == "-" else 0
        else:
            bits = ord(part[6] or part[7]) - 63
            end = x + int(part[5] or 1)
            for column in range(x, end):
                for i in (i for i in range(6) if bits >> i & 1):
                    image.putpixel((column, y + i), palette[colour])  # raises beyond the size that was said
            x = end
    return image

"""A small picture as each protocol wants it. Pure: image in, characters out."""

import io
import re
from base64 import b64encode
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["BYTES_MAX", "DIACRITICS", "iterm", "kitty", "kitty_cell", "kitty_delete", "kitty_send", "sixel"]

BYTES_MAX = 16 * 1024
"""What one picture may cost on the wire. A thumbnail of 80×60 pixels takes 0.5 to 3 kB."""

COLOURS = (64, 16, 8, 4, 2)
"""As many as fit into `BYTES_MAX`."""

CHUNK = 4096
"""Characters of base64 in one of kitty's commands, at most."""

BAND = 6
"""Rows of pixels in one line of sixels."""

PIXELS_MAX = 2**16
"""Pixels of a picture in sixels; a larger one would not be small on the wire either."""

SIGNS = bytes(63 + n for n in range(64)) + bytes(192)
_RUN = re.compile(rb"(.)\1{3,}", re.DOTALL)

DIACRITICS = (
    "\u0305\u030d\u030e\u0310\u0312\u033d\u033e\u033f\u0346\u034a\u034b\u034c\u0350\u0351\u0352\u0357"
    "\u035b\u0363\u0364\u0365\u0366\u0367\u0368\u0369\u036a\u036b\u036c\u036d\u036e\u036f\u0483\u0484"
)
"""The first of those by which kitty counts rows, columns and the high byte of an id."""

PLACEHOLDER = "\U0010eeee"


def kitty(image: "Image") -> str | None:
    """The picture as kitty takes it; None when it is too large."""
    return _fitting(lambda colours: b64encode(_png(image, colours)).decode())


def kitty_send(data: str, number: int, columns: int, rows: int, *, in_tmux: bool = False) -> str:
    """Sends what `kitty` made under an id, to be drawn in so many cells wherever its placeholders are."""
    pieces = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]
    commands = [f"q=2,m=1;{piece}" for piece in pieces[:-1]] + [f"q=2,m=0;{pieces[-1]}"]
    commands[0] = f"a=T,U=1,i={number},f=100,c={columns},r={rows},{commands[0]}"
    return "".join(_command(text, in_tmux) for text in commands)


def kitty_cell(number: int, row: int, column: int) -> tuple[str, str]:
    """The placeholder of one cell of a picture, and its foreground, as SGR parameters.

    The low byte of the id is the colour, one of 256 so that nothing on the way rounds it.
    """
    high, low = number >> 24, number & 0xFF
    return f"{PLACEHOLDER}{DIACRITICS[row]}{DIACRITICS[column]}{DIACRITICS[high]}", f"38;5;{low}"


def kitty_delete(number: int, *, in_tmux: bool = False) -> str:
    """Takes the picture, and what the terminal keeps of it, away."""
    return _command(f"a=d,d=I,i={number},q=2", in_tmux)


def _command(text: str, in_tmux: bool) -> str:
    """One of kitty's commands; tmux hands it to the terminal around it where `allow-passthrough` is on."""
    command = f"\x1b_G{text}\x1b\\"
    return f"\x1bPtmux;{command.replace(chr(27), chr(27) * 2)}\x1b\\" if in_tmux else command


def iterm(image: "Image", columns: int, rows: int) -> str | None:
    """Draws the picture at the cursor, in so many cells; None when it is too large."""

    def whole(colours: int) -> str:
        png = _png(image, colours)
        head = f"inline=1;size={len(png)};width={columns};height={rows};preserveAspectRatio=1"
        return f"\x1b]1337;File={head}:{b64encode(png).decode()}\x07"

    return _fitting(whole)


def sixel(image: "Image") -> str | None:
    """Draws the picture at the cursor, pixel by pixel; None when it is too large.

    Its height is cut to whole bands: half a band would reach into the line of text below.
    """
    if image.width * image.height > PIXELS_MAX:
        return None
    height = max(image.height // BAND * BAND, BAND)
    if height != image.height:
        image = image.resize((image.width, height))
    return _fitting(lambda colours: _sixels(image, colours))


def _fitting(encoded: Callable[[int], str]) -> str | None:
    return next((data for colours in COLOURS if len(data := encoded(colours)) <= BYTES_MAX), None)


def _png(image: "Image", colours: int) -> bytes:
    out = io.BytesIO()
    image.quantize(colours).save(out, "PNG", optimize=True)
    return out.getvalue()


def _sixels(image: "Image", colours: int) -> str:
    reduced = image.quantize(colours)
    palette = reduced.getpalette() or []
    pixels = reduced.tobytes()
    width = reduced.width
    out = [f'\x1bP0;1;0q"1;1;{width};{reduced.height}']
    for n in sorted(set(pixels)):
        r, g, b = (round(v * 100 / 255) for v in palette[n * 3 : n * 3 + 3])
        out.append(f"#{n};2;{r};{g};{b}")
    bands = []
    for top in range(0, reduced.height, BAND):
        rows: dict[int, bytearray] = {}
        for i in range(BAND):
            start = (top + i) * width
            for x, n in enumerate(pixels[start : start + width]):
                rows.setdefault(n, bytearray(width))[x] |= 1 << i
        bands.append("$".join(f"#{n}{_signs(bits)}" for n, bits in sorted(rows.items())))
    return "".join(out) + "-".join(bands) + "\x1b\\"


def _signs(bits: bytearray) -> str:
    """The sixels of one colour in one band; what is empty at the end is left away."""
    signs = bits.rstrip(b"\0").translate(SIGNS)
    return _RUN.sub(lambda run: b"!%d%c" % (len(run[0]), run[0][0]), signs).decode()

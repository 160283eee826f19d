"""Draws the samples anew: `python -m eccon.sim.samples.make`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from PIL import Image, ImageDraw

Draw: TypeAlias = Callable[[ImageDraw.ImageDraw, int, int], None]


def _circle(d: ImageDraw.ImageDraw, w: int, h: int) -> None:
    r = min(w, h) // 3
    d.ellipse((w // 2 - r, h // 2 - r, w // 2 + r, h // 2 + r), fill="#fff4d6")


def _square(d: ImageDraw.ImageDraw, w: int, h: int) -> None:
    r = min(w, h) // 3
    d.rectangle((w // 2 - r, h // 2 - r, w // 2 + r, h // 2 + r), fill="#ffe066")


def _triangle(d: ImageDraw.ImageDraw, w: int, h: int) -> None:
    d.polygon([(w // 2, h // 6), (w * 5 // 6, h * 5 // 6), (w // 6, h * 5 // 6)], fill="#1b4332")


def _stripes(d: ImageDraw.ImageDraw, w: int, h: int) -> None:
    for x in range(0, w, w // 6):
        d.rectangle((x, 0, x + w // 12, h), fill="#f8f9fa")


def _house(d: ImageDraw.ImageDraw, w: int, h: int) -> None:
    d.rectangle((w // 4, h // 2, w * 3 // 4, h * 7 // 8), fill="#9c6644")
    d.polygon([(w // 2, h // 6), (w * 7 // 8, h // 2), (w // 8, h // 2)], fill="#7f1d1d")
    d.rectangle((w * 7 // 16, h * 5 // 8, w * 9 // 16, h * 7 // 8), fill="#3b2418")


def _board(d: ImageDraw.ImageDraw, w: int, h: int) -> None:
    side = w // 8
    for i in range(0, w, side):
        for j in range(0, h, side):
            if (i // side + j // side) % 2:
                d.rectangle((i, j, i + side - 1, j + side - 1), fill="#111827")


def _cross(d: ImageDraw.ImageDraw, w: int, h: int) -> None:
    d.rectangle((w * 2 // 5, h // 8, w * 3 // 5, h * 7 // 8), fill="#d00000")
    d.rectangle((w // 8, h * 2 // 5, w * 7 // 8, h * 3 // 5), fill="#d00000")


def _rings(d: ImageDraw.ImageDraw, w: int, h: int) -> None:
    for i, colour in enumerate(("#ffafcc", "#cdb4db", "#a2d2ff", "#ffffff")):
        r = min(w, h) * (4 - i) // 9
        d.ellipse((w // 2 - r, h // 2 - r, w // 2 + r, h // 2 + r), fill=colour)


SAMPLES: tuple[tuple[str, tuple[int, int], str, Draw, dict[str, Any]], ...] = (
    ("1-circle.png", (640, 480), "#d1495b", _circle, {"optimize": True}),
    ("2-square.jpg", (800, 600), "#1d4e89", _square, {"quality": 80}),
    ("3-triangle.webp", (512, 512), "#74c69d", _triangle, {"quality": 80}),
    ("4-stripes.gif", (320, 240), "#e85d04", _stripes, {}),
    ("5-house.png", (1024, 768), "#90caf9", _house, {"optimize": True}),
    ("6-board.bmp", (128, 128), "#fefae0", _board, {}),
    ("7-cross.jpg", (600, 900), "#f1faee", _cross, {"quality": 80}),
    ("8-rings.webp", (1280, 720), "#3a0ca3", _rings, {"quality": 80}),
)

if __name__ == "__main__":
    for name, size, ground, draw, options in SAMPLES:
        picture = Image.new("RGB", size, ground)
        draw(ImageDraw.Draw(picture), *size)
        picture.save(Path(__file__).parent / name, **options)

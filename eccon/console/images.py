"""Images of a test prompt: which ones are meant, and what they look like in small."""

import contextlib
import io
import random
import re
import shlex
from base64 import b64encode
from functools import lru_cache
from glob import glob
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING

from eccon.console import paths
from eccon.console.draw.text import Line
from eccon.prompt import IMAGE_BYTES_MAX, PromptError, image_type, samples

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["expand", "files", "half_blocks", "thumbnail"]

COUNT_MAX = 64
SIDE_MAX = 8192
THUMBNAIL = (320, 320)
"""Pixels, at most, of what is kept of an image for its preview."""

_SAMPLES = re.compile(r"samples?(?::(\d+))?$")
_URL = re.compile(r"(?:https?://|data:)", re.IGNORECASE)
_NEW = re.compile(r"new:(\d+)x(\d+)x(\d+)$")


def expand(text: str) -> list[str]:
    """The images that a field of the prompt means.

    Words are paths, patterns of paths (`*.png`), directories, URLs, `samples` or `samples:3` for those
    that come with the package, and `new:4x640x480` for four made-up images of that width and height.

    Raises:
        PromptError: a word cannot be understood; the message says which.
    """
    try:
        words = shlex.split(text)
    except ValueError as e:
        msg = f"images: {e}"
        raise PromptError(msg) from e
    out: list[str] = []
    for word in words:
        if found := _SAMPLES.match(word):
            all_of_them = _samples()
            out += all_of_them[: int(found[1])] if found[1] else all_of_them
        elif found := _NEW.match(word):
            n, width, height = (int(g) for g in found.groups())
            if not (1 <= n <= COUNT_MAX and 1 <= width <= SIDE_MAX and 1 <= height <= SIDE_MAX):
                msg = f"{word}: at most {COUNT_MAX} images, at most {SIDE_MAX} pixels a side"
                raise PromptError(msg)
            out += [_made_up(width, height) for _ in range(n)]
        else:
            out += _paths_of(word)
    if len(out) > COUNT_MAX:
        msg = f"{len(out)} images are more than {COUNT_MAX}"
        raise PromptError(msg)
    return out


def files(text: str) -> list[str]:
    """The files among the images of `expand`, for previews; nothing is made or said."""
    out: list[str] = []
    try:
        words = shlex.split(text)
    except ValueError:
        return out
    for word in words:
        if found := _SAMPLES.match(word):
            with contextlib.suppress(PromptError):
                out += _samples()[: int(found[1]) if found[1] else None]
        elif not _NEW.match(word) and (word.startswith("file://") or not _URL.match(word)):
            with contextlib.suppress(PromptError):
                out += _paths_of(word)
    return out


def _samples() -> list[str]:
    try:
        return [str(p) for p in samples()]
    except OSError as e:
        msg = f"the sample images cannot be read: {e.strerror}"
        raise PromptError(msg) from e


def _paths_of(word: str) -> list[str]:
    """The images of one word. Terminals paste a dropped file as a path or as a file: URL."""
    if word.startswith("file://"):
        word = paths.of_url(word)
    elif _URL.match(word):
        return [word]
    path = Path(word).expanduser()
    if path.is_dir():
        found = sorted(str(p) for p in path.iterdir() if image_type(p))
    elif any(c in word for c in "*?[") and not path.exists():
        found = sorted(glob(str(path)))  # noqa: PTH207  Path.glob takes no absolute pattern
    else:
        return [word]
    if not found:
        msg = f"{word}: no image there"
        raise PromptError(msg)
    return found


def _made_up(width: int, height: int) -> str:
    from PIL import Image  # noqa: PLC0415  costs 50 ms that the first paint should not pay

    image = Image.linear_gradient("L").resize((width, height))
    a, b = (tuple(random.randrange(256) for _ in range(3)) for _ in range(2))
    out = io.BytesIO()
    Image.composite(Image.new("RGB", image.size, a), Image.new("RGB", image.size, b), image).save(out, "PNG")
    return f"data:image/png;base64,{b64encode(out.getvalue()).decode()}"


def thumbnail(image: str) -> "Image | None":
    """The file's image, at most `THUMBNAIL` pixels large; None when there is none, or too much to look at.

    May take as long as decoding does: not for the event loop.
    """
    path = Path(image).expanduser()
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return None
    # Neither a pipe, which would never end, nor what could not be sent anyway.
    if not S_ISREG(stat.st_mode) or stat.st_size > IMAGE_BYTES_MAX:
        return None
    return _thumbnail(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(64)
def _thumbnail(path: Path, changed: int, size: int) -> "Image | None":  # noqa: ARG001  what the file was
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415  costs 50 ms that the first paint should not pay

    try:
        with Image.open(path) as opened:
            opened.draft("RGB", THUMBNAIL)
            opened.thumbnail(THUMBNAIL)
            picture: Image.Image = opened.convert("RGB")
            return picture
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError):
        return None  # Pillow's decoders raise SyntaxError for some broken files


def half_blocks(picture: "Image", columns: int, rows: int) -> list[Line]:
    """The picture in at most so many cells, each of them two pixels."""
    small = picture.copy()
    small.thumbnail((columns, rows * 2))
    pixels = small.load()
    lines: list[Line] = []
    if pixels is None:
        return lines
    for y in range(0, small.height, 2):
        line: Line = []
        for x in range(small.width):
            # A last row without another below is drawn twice, else it would be lost.
            line.append(("▀", f"{_hex(pixels[x, y])},{_hex(pixels[x, min(y + 1, small.height - 1)])}"))
        lines.append(line)
    return lines


def _hex(pixel: object) -> str:
    r, g, b = pixel if isinstance(pixel, tuple) else (0, 0, 0)
    return f"#{r & 0xF0:02x}{g & 0xF0:02x}{b & 0xF0:02x}"

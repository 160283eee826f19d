"""What the terminal can show, from the environment and the system alone. Imports no Textual."""

import fcntl
import os
import struct
import sys
import termios
from collections.abc import Mapping

__all__ = ["ascii_only", "cell_pixels", "low_bandwidth", "no_colour", "refuse_reason"]

C_LOCALES = ("C", "POSIX")


def refuse_reason() -> str | None:
    """Why the console cannot be drawn here, in one line; None when it can."""
    if os.environ.get("TEXTUAL_DRIVER"):
        return None  # a page in a browser
    term = os.environ.get("TERM", "")
    if term in ("", "dumb", "unknown"):
        return f"TERM={term!r} cannot show the console; `eccon status` prints the same as text"
    for stream, name in ((sys.__stdin__, "stdin"), (sys.__stdout__, "stdout"), (sys.__stderr__, "stderr")):
        try:
            is_tty = stream is not None and os.isatty(stream.fileno())
        except (OSError, ValueError):
            is_tty = False
        if not is_tty:
            return f"the console needs a terminal and {name} is none; `eccon status` prints the same as text"
    return None


def ascii_only(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the locale (or `ECCON_ASCII`) asks for nothing but ASCII.

    An unset locale is taken for a modern terminal: containers leave it unset. Python itself turns
    `LANG=C` into `LC_CTYPE=C.UTF-8` at its start, so that value says nothing beside a `LANG=C`.
    """
    if environ.get("ECCON_ASCII"):
        return True
    lang = environ.get("LANG", "")
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        value = environ.get(name, "")
        if not value or (name == "LC_CTYPE" and value == "C.UTF-8" and lang in ("", *C_LOCALES)):
            continue
        charset = value.partition(".")[2].partition("@")[0].lower().replace("-", "")
        return value in C_LOCALES or (bool(charset) and charset != "utf8")
    return False


def no_colour(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `NO_COLOR` is set to anything but the empty string (no-color.org)."""
    return bool(environ.get("NO_COLOR"))


def low_bandwidth(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `ECCON_LOW_BANDWIDTH` asks for few bytes: slower ticks, no charts."""
    return bool(environ.get("ECCON_LOW_BANDWIDTH"))


def cell_pixels(fd: int) -> tuple[int, int] | None:
    """Width and height of a cell as the terminal told the system, rounded down; None when it did not.

    xterm counts its border in, which is less than a pixel a cell.
    """
    try:
        rows, columns, width, height = struct.unpack("HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)))
    except OSError:
        return None
    return (
        (width // columns, height // rows)
        if columns and rows and width >= columns and height >= rows
        else None
    )

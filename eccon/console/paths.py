"""Paths in a line of words, split as a shell does: completed as they are typed, pasted as terminals do."""

import os
import re
import shlex
from pathlib import Path
from urllib.parse import unquote

from eccon.prompt import image_type

__all__ = ["complete", "is_drop", "of_url", "pasted"]

_PLAIN = re.compile(r"([^\w@%+=:,./~-])")
_DROP = re.compile(r"['\"]?(?:/|~|\./|\.\./|[a-z]+://)", re.IGNORECASE)


def of_url(url: str) -> str:
    """The path of a file: URL, with or without a host."""
    rest = url[len("file://") :]
    return unquote(rest if rest.startswith("/") else "/" + rest.partition("/")[2])


def is_drop(text: str) -> bool:
    """Whether what is pasted is a path or URL of its own, not a piece of the word at the cursor."""
    return bool(_DROP.match(text.lstrip()))


def pasted(text: str) -> str:
    """What a terminal pastes for dropped files, as words: one path a line, quoted or not, or file: URLs."""
    lines = (line.strip() for line in text.splitlines())
    return " ".join(shlex.quote(line) if _is_path(line) else line for line in lines if line)


def _is_path(line: str) -> bool:
    return line != shlex.quote(line) and os.path.lexists(os.path.expanduser(line))  # noqa: PTH111  raises nothing


def complete(text: str) -> str | None:
    """`text` with its last word completed as the path of a directory or an image; None when nothing fits.

    What is added is quoted as the word is. Reads a directory.
    """
    word, quote = _last_word(text)
    if not word or "://" in word or word.startswith(("samples", "new:")):
        return None
    parent, _, start = word.rpartition("/")
    name = _first(Path(parent + "/" if "/" in word else ".").expanduser(), start)
    if name is None:
        return None
    rest = name[len(start) :]
    if quote == "'" and "'" in rest:
        return None
    if quote == '"':
        rest = re.sub(r'(["\\])', r"\\\1", rest)
    elif not quote:
        rest = _PLAIN.sub(r"\\\1", rest)
    return text + rest + ("" if rest.endswith("/") else quote)


def _first(directory: Path, start: str) -> str | None:
    """The first name that begins so and is more, a directory's with a slash."""
    names: list[str] = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if not entry.name.startswith(start) or (entry.name.startswith(".") and not start):
                    continue
                if entry.is_dir():
                    names.append(entry.name + "/")
                elif image_type(Path(entry.name)) and entry.name != start:
                    names.append(entry.name)
    except (OSError, ValueError):
        return None
    return min(names, default=None)


def _last_word(text: str) -> tuple[str, str]:
    """The word that the end of the text is in, unquoted, and the quote that is open; "" after a blank."""
    word = quote = ""
    at = 0
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            if at + 1 == len(text):
                return "", ""
            at += 1
            word += text[at] if not quote or text[at] in '"\\' else "\\" + text[at]
        elif quote:
            quote, word = ("", word) if char == quote else (quote, word + char)
        elif char in "'\"":
            quote = char
        else:
            word = "" if char.isspace() else word + char
        at += 1
    return word, quote

"""Desktop notifications through the terminal, which may be at the other end of an SSH link."""

from typing import Literal, TypeAlias

from eccon.console.draw.text import clean

__all__ = ["Notify", "sequence"]

Notify: TypeAlias = Literal["off", "osc9", "osc777"]
TEXT_MAX = 300


def sequence(kind: Notify, title: str, text: str, *, tmux: bool) -> str:
    """What to write so that the terminal shows a notification; nothing in it can end the sequence early.

    Inside tmux it is handed through, where tmux is told to (`set -g allow-passthrough on`).
    """
    title, text = clean(title).replace(";", ","), clean(text)[:TEXT_MAX]
    body = {"off": "", "osc9": f"\x1b]9;{title}: {text}\x07", "osc777": f"\x1b]777;notify;{title};{text}\x07"}
    said = body[kind]
    return f"\x1bPtmux;{said.replace(chr(27), chr(27) * 2)}\x1b\\" if tmux and said else said

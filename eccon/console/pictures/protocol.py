"""Which protocol pictures are drawn by: what the user says, else what the terminal says of itself."""

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from eccon.console.pictures.answers import Answers

__all__ = ["Protocol", "Setting", "asks", "choose", "in_multiplexer"]

Setting: TypeAlias = Literal["auto", "kitty", "sixel", "iterm", "blocks", "off"]
Protocol: TypeAlias = Literal["kitty", "sixel", "iterm", "blocks", "off"]

SIXEL = 4
"""The attribute in the answer to DA1."""

KITTY_SINCE = (0, 28)
"""The first kitty with Unicode placeholders."""


def in_multiplexer(environ: Mapping[str, str]) -> bool:
    """Whether tmux or screen is between us and the terminal."""
    return bool(environ.get("TMUX")) or environ.get("TERM", "").startswith(("tmux", "screen"))


def asks(setting: Setting, environ: Mapping[str, str]) -> bool:
    """Whether the terminal's answers would matter.

    tmux answers for itself: it says "sixel" whatever the terminal around it can draw, so it is not asked
    this way. The Linux console draws no pictures.
    """
    if setting == "auto":
        return not in_multiplexer(environ) and environ.get("TERM") != "linux"
    return setting in ("kitty", "sixel", "iterm")


def choose(setting: Setting, environ: Mapping[str, str], answers: Answers) -> Protocol:
    """The protocol to draw by; half blocks as long as the terminal has not said what it can.

    kitty's protocol is used by placeholders alone, which only kitty and Ghostty draw: others answer that
    they know the protocol and then show the placeholders as text. So those two are known by name.
    Sixel needs a cell's size: a picture of the wrong size would cover its neighbours. iTerm2's protocol draws
    at the cursor, which is not where the terminal around tmux has its own.
    """
    if (setting == "sixel" and answers.cell is None) or (setting == "iterm" and in_multiplexer(environ)):
        return "blocks"
    if setting != "auto":
        return setting
    if not answers.complete:
        return "blocks"
    name = answers.name.lower() or _name_from(environ)
    if name.startswith("ghostty") or (name.startswith("kitty") and _version(name) >= KITTY_SINCE):
        return "kitty"
    if in_multiplexer(environ):
        return "blocks"
    if name.startswith(("iterm2", "wezterm")):
        return "iterm"
    return "sixel" if SIXEL in answers.attributes and answers.cell is not None else "blocks"


def _name_from(environ: Mapping[str, str]) -> str:
    """The terminal's name by its environment, for one that does not tell.

    Over a link it is not the terminal that is silent but what lies between, as mosh does, which hands no
    pictures on either.
    """
    if environ.get("SSH_CONNECTION") or environ.get("SSH_TTY"):
        return ""
    term, program = environ.get("TERM", ""), environ.get("TERM_PROGRAM", "")
    if term == "xterm-kitty" or environ.get("KITTY_WINDOW_ID"):
        return "kitty"
    if term == "xterm-ghostty" or program == "ghostty":
        return "ghostty"
    if program == "iTerm.app" or environ.get("LC_TERMINAL") == "iTerm2":
        return "iterm2"
    return "wezterm" if program == "WezTerm" else ""


def _version(name: str) -> tuple[int, ...]:
    """The version in `kitty(0.32.1)`; one that is not told is new enough."""
    found = re.search(r"(\d+)\.(\d+)", name)
    return (int(found[1]), int(found[2])) if found else KITTY_SINCE

"""Last step before the terminal: no colour at all, or nothing but ASCII, whatever widget drew it."""

from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

__all__ = ["Ascii", "NoColour"]

_TABLE = {
    **dict.fromkeys("─▔▁", "-"),
    # The waterfall's stretches and the bars stay apart from each other and from frames.
    **dict.fromkeys("━╸", "="),
    "═": "#",
    "┄": ".",
    "╌": "-",
    "╍": "x",
    **dict.fromkeys("│┃┆┊▏▎▍▌▋▊▉▕║", "|"),
    **dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼┏┓┗┛╔╗╚╝╴╶╵╷", "+"),
    **dict.fromkeys("█▇▆▅▄▀▐■", "#"),
    **dict.fromkeys("▃▂", "."),
    "▁": "_",
    "●": "*",
    "○": "o",
    "◌": ".",
    "◔": ":",
    "◐": "%",
    "◒": "~",
    "◑": "%",
    "↻": "@",
    "▲": "!",
    "✗": "x",
    "✕": "x",
    "╳": "x",
    "✓": "+",
    "▶": ">",
    "▸": ">",
    "◀": "<",
    "→": ">",
    "↑": "^",
    "↓": "v",
    "–": "-",
    "…": "~",
    "·": ".",
    "×": "x",
    "␛": "^",
    "␤": "$",
    "␦": "?",
    "�": "?",
}


@lru_cache(4096)
def to_ascii(text: str) -> str:
    """`text` in ASCII, as many cells wide as before."""
    if text.isascii():
        return text
    return "".join(c if c.isascii() else _TABLE.get(c) or "?" * cell_len(c) for c in text)


class Ascii(LineFilter):
    """Replaces every character beyond ASCII by one of the same width."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:  # noqa: ARG002  Textual's
        return [s if s.control else Segment(to_ascii(s.text), s.style) for s in segments]


@lru_cache(4096)
def _without(style: Style) -> Style:
    # What only a background told apart (a chosen line, a focused button) is reversed instead.
    told_apart = style.bgcolor is not None and not style.bgcolor.is_default
    return Style(
        bold=style.bold,
        dim=style.dim,
        italic=style.italic,
        underline=style.underline,
        strike=style.strike,
        reverse=style.reverse or told_apart,
    )


class NoColour(LineFilter):
    """Drops colours. Meant for an ANSI theme, whose plain background is the terminal's own."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:  # noqa: ARG002  Textual's
        return [s if s.control or s.style is None else Segment(s.text, _without(s.style)) for s in segments]

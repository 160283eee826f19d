"""Text in nothing but ASCII; styles without colours, or without the faintness that terminals differ in."""

from functools import lru_cache

from rich.cells import cell_len
from rich.color import Color
from rich.color_triplet import ColorTriplet
from rich.style import Style

__all__ = ["blended", "to_ascii", "without_colours"]

DIM = 0.66
"""How much of its colour faint text keeps over its background, as with Textual 8.2."""

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


@lru_cache(4096)
def without_colours(style: Style) -> Style:
    """`style` with its attributes alone."""
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


@lru_cache(4096)
def blended(style: Style) -> Style:
    """A faint style as a plain one, its colour nearer to the background."""
    fore = style.color and style.color.triplet
    back = style.bgcolor and style.bgcolor.triplet
    if fore is None or back is None:
        return style
    mixed = (int(b + (f - b) * DIM) for f, b in zip(fore, back, strict=True))
    return style + Style(color=Color.from_triplet(ColorTriplet(*mixed)), dim=False)

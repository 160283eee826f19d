"""Last step before the terminal: no colour at all, or nothing but ASCII, whatever widget drew it."""

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from eccon.console.plainer import to_ascii, without_colours

__all__ = ["Ascii", "NoColour"]


class Ascii(LineFilter):
    """Replaces every character beyond ASCII by one of the same width."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:  # noqa: ARG002  Textual's
        return [s if s.control else Segment(to_ascii(s.text), s.style) for s in segments]


class NoColour(LineFilter):
    """Drops colours. Meant for an ANSI theme, whose plain background is the terminal's own."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:  # noqa: ARG002  Textual's
        return [
            s if s.control or s.style is None else Segment(s.text, without_colours(s.style)) for s in segments
        ]

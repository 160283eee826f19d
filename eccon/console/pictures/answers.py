"""What the terminal is asked about pictures, and its answers, which arrive among the keys.

Only questions that every terminal since the VT100 takes in silence when it does not know them: its name
(XTVERSION), a cell's size in pixels, and last its attributes (DA1), which nearly all answer. An answer may
be late, split or cut off: what belongs to one never reaches the keys.
"""

import re
from dataclasses import dataclass, replace

__all__ = ["ASK", "ASK_SIZE", "Answers", "Strainer"]

ASK_SIZE = "\x1b[16t"
ASK = f"\x1b[>q{ASK_SIZE}\x1b[c"

_WHOLE = re.compile(
    r"\x1b\[\?(?P<attributes>[\d;]*)c"
    r"|\x1b\[6;(?P<height>\d{1,5});(?P<width>\d{1,5})t"
    r"|\x1bP>\|(?P<name>[^\x1b\x07]{0,256})(?:\x1b\\|\x07)"
    r"|\x1b_G[^\x1b\x07]{0,4096}(?:\x1b\\|\x07)"  # kitty's word on a picture: none was asked for
    r"|\x1b(?:\[\?[\d;]*|\[6;[\d;]*|P>\|?[^\x1b\x07]{0,256}|_G[^\x1b\x07]{0,4096})(?=\x1b[^\\])"  # cut off
)
_BEGUN = re.compile(
    r"\x1b(?:\[(?:\?[\d;]*|6(?:;[\d;]{0,11})?)?|P(?:>(?:\|[^\x1b\x07]{0,256}\x1b?)?)?|_(?:G[^\x1b\x07]{0,4096}\x1b?)?)?\Z"
)
_SURE = ("\x1b[?", "\x1b[6;", "\x1bP>", "\x1b_G")
"""Beginnings that no key has."""

KEY_S = 0.1
"""A lone escape is a key when nothing follows within this time."""

REST_S = 3.0
"""The rest of an answer that has begun is waited for so long; then its beginning is dropped."""

EXPECTED_S = 10.0
"""After a question an escape may be the beginning of an answer for so long."""


@dataclass(frozen=True)
class Answers:
    """What the terminal has said of itself so far."""

    name: str = ""
    """Its name and version, in its own words."""
    attributes: frozenset[int] = frozenset()
    """DA1: 4 is sixel."""
    cell: tuple[int, int] | None = None
    """Width and height of a cell in pixels."""
    complete: bool = False
    """Whether the last question is answered, so that no other answer is under way."""


class Strainer:
    """Takes the answers out of what the terminal sends. Times are seconds of one clock."""

    def __init__(self) -> None:
        self.answers = Answers()
        self._held = ""
        self._since = 0.0
        self._asked = float("-inf")

    def asked(self, now: float) -> None:
        """A question was written."""
        self._asked = now

    @property
    def holding(self) -> bool:
        """Whether something is kept that `tick` has to look at soon."""
        return bool(self._held)

    def feed(self, text: str, now: float) -> str:
        """What is left of the input for the keys."""
        text = self._held + text
        self._held = ""
        text = _WHOLE.sub(self._take, text)
        begun = _BEGUN.search(text)
        if begun and (begun[0].startswith(_SURE) or now - self._asked < EXPECTED_S):
            self._held, text = begun[0], text[: begun.start()]
            self._since = now
        return text

    def tick(self, now: float) -> str:
        """What was held and turns out to be keys."""
        sure = self._held.startswith(_SURE)
        if not self._held or now - self._since < (REST_S if sure else KEY_S):
            return ""
        held, self._held = self._held, ""
        return "" if sure else held

    def _take(self, match: re.Match[str]) -> str:
        if match["attributes"] is not None:
            # The first number is the class of terminal.
            numbers = [int(n) for n in match["attributes"].split(";") if n][1:]
            self.answers = replace(self.answers, attributes=frozenset(numbers), complete=True)
        elif match["height"] is not None:
            width, height = int(match["width"]), int(match["height"])
            if 1 <= width <= 256 and 1 <= height <= 256:
                self.answers = replace(self.answers, cell=(width, height))
        elif match["name"] is not None:
            self.answers = replace(self.answers, name=match["name"])
        return ""

"""Themes from small TOML files, ours and the user's; a broken one is reported and never fatal.

A theme names a dozen colours; everything drawn uses tokens made of them. Textual is imported only for what is
its own: the first frame is drawn before it is there.
"""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.color import Color, ColorType
from rich.color_triplet import ColorTriplet
from rich.style import Style

import eccon

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from textual.theme import Theme

__all__ = ["DEFAULT", "NO_COLOUR", "Palette", "ThemeFile", "colour", "load_all", "user_directory"]

DEFAULT = "eccon-dark"
NO_COLOUR = "ansi"

TONES: dict[str, str] = {
    "text": "text",
    "dim": "dim",
    "head": "dim",
    "title": "text bold",
    "accent": "accent",
    "ok": "ok",
    "warn": "warn bold",
    "bad": "bad bold",
    "second": "second",
    "busy": "busy",
    "error": "bad",
    "bar": "accent",
    "frame": "faint",
    "key": "accent bold",
    "hint": "dim",
    "top": "text",
    "topdim": "dim",
    "brand": "accent bold reverse",
    "encode": "accent",
    "move": "second bold",
    "gate": "dim",
    "pd": "ok",
    "stream": "ok",
    "match": "warn bold reverse",
    "found": "warn underline",
    "cursor": "text",
}
"""Token → colour and attributes. A theme's [styles] table may override each."""

_ANSI = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
ANSI_COLOURS = {
    **{f"ansi_{name}": i for i, name in enumerate(_ANSI)},
    **{f"ansi_bright_{name}": i + 8 for i, name in enumerate(_ANSI)},
}
_HEX = re.compile("#[0-9a-fA-F]{6}")

ATTRIBUTES = ("bold", "dim", "italic", "underline", "reverse", "strike")


class Colours(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The colours of a theme: #rrggbb, or ansi_… names in an ANSI theme."""

    background: str
    surface: str
    panel: str
    text: str
    dim: str
    faint: str
    accent: str
    second: str
    ok: str
    warn: str
    bad: str
    busy: str
    cursor: str
    """Background of the chosen line."""


class ThemeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One theme as its file says."""

    name: str
    title: str
    colours: Colours
    dark: bool = True
    ansi: bool = False
    styles: dict[str, str] = {}

    def textual(self) -> "Theme":
        """The same as a theme of Textual."""
        from textual.theme import Theme  # noqa: PLC0415  see above

        c = self.colours
        return Theme(
            name=self.name,
            primary=c.accent,
            secondary=c.second,
            warning=c.warn,
            error=c.bad,
            success=c.ok,
            accent=c.accent,
            foreground=c.text,
            background=c.background,
            surface=c.surface,
            panel=c.panel,
            dark=self.dark,
            ansi=self.ansi,
            variables={
                "ansi-background": c.background,
                "ansi-foreground": c.text,
                "faint": c.faint,
                "dim": c.dim,
                "cursor": c.cursor,
                "top": c.panel,
                "border": c.accent,
                "border-blurred": c.faint,
                "block-cursor-background": c.cursor,
                "block-cursor-foreground": c.text,
                "block-cursor-text-style": "bold",
                "input-selection-background": c.cursor,
                "scrollbar": c.faint,
                "scrollbar-hover": c.dim,
                "scrollbar-active": c.accent,
                "scrollbar-background": c.background,
                "scrollbar-background-hover": c.background,
                "scrollbar-background-active": c.background,
                "scrollbar-corner-color": c.background,
                "screen-selection-background": c.cursor,
                "screen-selection-foreground": c.text,
            },
        )


class Palette:
    """Styles of the tokens in a theme."""

    def __init__(self, theme: ThemeFile) -> None:
        self.theme = theme
        specs = {**TONES, **theme.styles}
        self._styles = {tone: _style(spec, theme.colours) for tone, spec in specs.items()}
        self.cursor = Style(bgcolor=colour(theme.colours.cursor))
        if theme.ansi:
            self.cursor = Style(reverse=True)

    def __getitem__(self, tone: str) -> Style:
        """The style of a tone; "#rrggbb,#rrggbb" is a cell of an image: its upper and lower half."""
        style = self._styles.get(tone)
        if style is None:
            style = self._styles["text"]
            if tone.startswith("#"):
                above, _, below = tone.partition(",")
                return Style(color=above, bgcolor=below)
        return style


def colour(text: str) -> Color:
    """A colour as a theme names it: #rrggbb, ansi_…, or anything else that Textual knows.

    Raises:
        ValueError: it is none.
    """
    if _HEX.fullmatch(text):
        r, g, b = bytes.fromhex(text[1:])
        return Color(text.lower(), ColorType.TRUECOLOR, None, ColorTriplet(r, g, b))
    if text == "ansi_default":
        return Color.parse("default")
    if (number := ANSI_COLOURS.get(text)) is not None:
        return Color.from_ansi(number)
    from textual.color import Color as AnyColour  # noqa: PLC0415  see above
    from textual.color import ColorParseError  # noqa: PLC0415

    try:
        return AnyColour.parse(text).rich_color
    except ColorParseError as e:
        raise ValueError(str(e)) from None


def _style(spec: str, colours: Colours) -> Style:
    attributes: dict[str, bool] = {}
    found = None
    for word in spec.split():
        if word in ATTRIBUTES:
            attributes[word] = True
        else:
            found = colour(getattr(colours, word, word))
    return Style(color=found, **attributes)  # type: ignore[arg-type]


def user_directory() -> Path:
    """Where a user's themes and keys are: `$XDG_CONFIG_HOME/eccon`, else `~/.config/eccon`."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "eccon"


def _shipped() -> Path:
    package = Path(eccon.__file__).parent
    inside = package / "themes"  # in a wheel; in a checkout they lie beside the package
    return inside if inside.is_dir() else package.parent / "themes"


def load_all(extra: Iterable[Path] = ()) -> tuple[dict[str, ThemeFile], list[str]]:
    """All themes by name, ours first, the user's over them; and what is wrong with the files left out."""
    themes: dict[str, ThemeFile] = {}
    failed: list[str] = []
    for directory in (_shipped(), user_directory() / "themes", *extra):
        for path in sorted(directory.glob("*.toml")) if directory.is_dir() else ():
            try:
                theme = _load(path)
            except (OSError, ValueError, msgspec.ValidationError) as e:
                failed.append(f"theme {path}: {e}")
            else:
                themes[theme.name] = theme
    return themes, failed


def _load(path: Path) -> ThemeFile:
    data: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    theme = msgspec.convert(data, ThemeFile)
    for field in msgspec.structs.fields(Colours):
        value = getattr(theme.colours, field.name)
        try:
            colour(value)
        except ValueError:
            msg = f"{value!r} is no colour (colours.{field.name})"
            raise ValueError(msg) from None
    for tone, spec in theme.styles.items():
        if tone not in TONES:
            msg = f"{tone!r} is no tone (styles)"
            raise ValueError(msg)
        try:
            _style(spec, theme.colours)
        except ValueError:
            msg = f"{spec!r} is no style (styles.{tone})"
            raise ValueError(msg) from None
    return theme

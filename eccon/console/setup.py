"""What the environment, the user's files and the options make of a console, before anything is drawn."""

from collections.abc import Mapping

import msgspec

from eccon.console import keymap, terminal, themes

__all__ = ["Setup", "setup"]


class Setup(msgspec.Struct, frozen=True):
    """How this console looks and which keys it has."""

    theme: str
    themes: dict[str, themes.ThemeFile]
    settings: keymap.Settings
    problems: list[str]
    """What is wrong in the user's files, and was left out."""
    no_colours: bool
    ascii_only: bool
    low_bandwidth: bool


def setup(asked: str | None, environ: Mapping[str, str]) -> Setup:
    """Reads all of it. A theme that is not there is reported and the default taken."""
    files, problems = themes.load_all()
    settings, wrong = keymap.load(themes.user_directory() / "console.toml")
    problems = problems + wrong
    no_colours, low = terminal.no_colour(environ), terminal.low_bandwidth(environ)
    wanted = asked or settings.theme or (themes.NO_COLOUR if low else themes.DEFAULT)
    if no_colours:
        wanted = themes.NO_COLOUR
    elif wanted not in files:
        problems.append(f"there is no theme {wanted!r}: {', '.join(sorted(files))}")
        wanted = themes.DEFAULT
    return Setup(
        theme=wanted,
        themes=files,
        settings=settings,
        problems=problems,
        no_colours=no_colours,
        ascii_only=terminal.ascii_only(environ),
        low_bandwidth=low,
    )

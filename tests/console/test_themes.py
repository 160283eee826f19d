"""Themes: ours load, a broken one is said and not fatal, texts can be read on their backgrounds."""

import itertools
from pathlib import Path

import pytest
from textual.color import Color

from eccon.console import terminal, themes
from eccon.console.app import ConsoleApp
from tests.console import states

OURS = {"eccon-dark", "eccon-light", "high-contrast", "colour-blind-safe", "ansi"}
THEMES, _ = themes.load_all()


def test_ours_load() -> None:
    loaded, failed = themes.load_all()
    assert set(loaded) >= OURS
    assert failed == []


def contrast(a: str, b: str) -> float:
    def luminance(value: str) -> float:
        parts = [
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in Color.parse(value).normalized
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", sorted(OURS - {"ansi"}))
def test_texts_can_be_read(name: str) -> None:
    c = THEMES[name].colours
    least = 7.0 if name == "high-contrast" else 4.5
    for tone in (c.text, c.accent, c.ok, c.warn, c.bad, c.busy, c.second):
        for ground in (c.background, c.surface, c.panel):
            assert contrast(tone, ground) >= least, (tone, ground)
    for ground in (c.background, c.surface, c.panel):
        assert contrast(c.dim, ground) >= (least if name == "high-contrast" else 4.0), ground
    assert contrast(c.text, c.cursor) >= least


def test_states_can_be_told_apart_without_red_and_green() -> None:
    """As someone without red or green cones sees them (Viénot 1999): every pair keeps a distance."""
    c = THEMES["colour-blind-safe"].colours

    def seen(value: str) -> tuple[float, float]:
        r, g, b = Color.parse(value).normalized
        return 0.29 * r + 0.71 * g, b  # deuteranopia, roughly: one axis for red and green, one for blue

    for a, b in itertools.combinations((c.ok, c.warn, c.bad, c.busy), 2):
        (ya, ba), (yb, bb) = seen(a), seen(b)
        assert abs(ya - yb) + abs(ba - bb) > 0.15, (a, b)


@pytest.mark.parametrize(
    "text",
    [
        "name = ",
        'name = "x"\ntitle = "x"\n',
        'name = "x"\ntitle = "x"\n[colours]\nbackground = "#nonsense"\n',
    ],
)
def test_a_broken_theme_is_said_and_not_fatal(own_home: Path, text: str) -> None:
    directory = own_home / "config" / "eccon" / "themes"
    directory.mkdir(parents=True)
    (directory / "mine.toml").write_text(text)
    loaded, failed = themes.load_all()
    assert set(loaded) >= OURS
    assert len(failed) == 1
    assert "mine.toml" in failed[0]


async def test_a_users_theme_is_there_and_previewed(own_home: Path, tmp_path: Path) -> None:
    directory = own_home / "config" / "eccon" / "themes"
    directory.mkdir(parents=True)
    ours = (themes._shipped() / "eccon-dark.toml").read_text()
    (directory / "mine.toml").write_text(
        ours.replace('"eccon-dark"', '"a-mine"').replace("Eccon dark", "Mine")
    )
    app = ConsoleApp(tmp_path / "none")
    app.state = states.busy()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("T")
        await pilot.pause()
        await pilot.press("home")
        await pilot.pause()
        assert app.theme == "a-mine"
        assert app.palette.theme.title == "Mine"
        await pilot.press("escape")
        await pilot.pause()
        assert app.theme == "eccon-dark"


async def test_a_theme_that_is_not_there_is_said(tmp_path: Path) -> None:
    app = ConsoleApp(tmp_path / "none", theme="mauve")
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        assert "mauve" in "".join(t for t, _ in app.message)
        assert app.theme == "eccon-dark"


def test_what_the_environment_asks_for() -> None:
    assert terminal.ascii_only({"LANG": "C"})
    assert terminal.ascii_only({"LANG": "C", "LC_CTYPE": "C.UTF-8"})  # Python's own coercion
    assert terminal.ascii_only({"LC_ALL": "POSIX", "LANG": "de_DE.UTF-8"})
    assert terminal.ascii_only({"LANG": "de_DE.ISO-8859-1"})
    assert not terminal.ascii_only({"LANG": "ko_KR.UTF-8"})
    assert not terminal.ascii_only({})
    assert not terminal.ascii_only({"LC_CTYPE": "C.UTF-8"})
    assert terminal.no_colour({"NO_COLOR": "1"})
    assert not terminal.no_colour({"NO_COLOR": ""})

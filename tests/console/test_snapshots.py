"""Every screen at three sizes from fixed states, as text; and its colours in three themes, as a digest.

`ECCON_SNAPSHOTS=write` writes what is drawn now; look at the difference before it is committed.
"""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual._compositor import LayoutUpdate

from eccon.console.app import ConsoleApp
from eccon.console.widgets.previews import Previews
from tests.console import states
from tests.console.fake_daemon import FakeDaemon, running

HERE = Path(__file__).parent / "snapshots"
SIZES = ((80, 24), (120, 36), (200, 60))
THEMES = ("eccon-dark", "eccon-light", "ansi")

SCREENS = {
    "overview": ("degraded", ()),
    "starting": ("starting", ()),
    "npus": ("on_npus", ()),
    "charts": ("on_npus", ("c",)),
    "many": ("many", ()),
    "traces": ("busy", ("t",)),
    "waterfall": ("busy", ("t", "down", "down", "enter")),
    "logs": ("busy", ("l",)),
    "encoder": ("degraded", ("down", "down", "down", "down", "down", "enter")),
    "pd": ("busy", ("enter",)),
    "events": ("degraded", ("e",)),
    "prompt": ("busy", ("p",)),
    "help": ("busy", ("question_mark",)),
    "question": ("degraded", ("down", "down", "r")),
    "leave": ("busy", ("q",)),
    "themes": ("busy", ("T",)),
    "jump": ("busy", ("J",)),
}


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch, utc: None) -> None:
    monkeypatch.setattr(time, "time", lambda: states.NOW)


@pytest.fixture(scope="module", params=sorted({s for s, _ in SCREENS.values()}))
def daemon(request: pytest.FixtureRequest) -> Iterator[tuple[str, FakeDaemon]]:
    with running(getattr(states, request.param)()) as fake:
        fake.log = [f"INFO 11-29 line {n}" for n in range(100)] + [
            "ERROR it broke [/]",
            "\x1b[33mWARNING\x1b[0m x",
        ]
        yield request.param, fake


def drawn(app: ConsoleApp) -> tuple[list[str], str]:
    """The screen's lines, and a digest of them with their styles."""
    update = app.screen._compositor.render_update(
        full=True, screen_stack=app._background_screens, simplify=True
    )
    assert isinstance(update, LayoutUpdate)
    lines = []
    digest = hashlib.sha256()
    for strips in update.strips:
        segments = [s for strip in strips for s in strip]
        lines.append("".join(s.text for s in segments).rstrip())
        digest.update(repr([(s.text, str(s.style)) for s in segments]).encode())
    return lines, digest.hexdigest()[:16]


async def settled(app: ConsoleApp, times: int) -> tuple[list[str], str]:
    """What is drawn when it has not changed so many times in a row."""
    before: tuple[list[str], str] = ([], "")
    same = 0
    for _ in range(200):
        await asyncio.sleep(0.015)
        app.redraw()
        await asyncio.sleep(0)
        now = drawn(app)
        same = same + 1 if now == before else 0
        if same == times:
            return now
        before = now
    msg = "the screen does not come to rest"
    raise AssertionError(msg)


async def becomes(app: ConsoleApp, text: str, digest: str | None) -> tuple[list[str], str]:
    """Draws until the screen is the wanted one; what is drawn in the end when it never is."""
    for _ in range(150):
        lines, now = drawn(app)
        if now == digest and "\n".join(lines) + "\n" == text:
            return lines, now
        await asyncio.sleep(0.02)
        app.redraw()
        await asyncio.sleep(0)
    return lines, now


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
async def test_screens(daemon: tuple[str, FakeDaemon], size: tuple[int, int]) -> None:
    kind, fake = daemon
    write = os.environ.get("ECCON_SNAPSHOTS") == "write"
    path = HERE / "colours.json"
    colours: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    wrong: list[str] = []
    app = ConsoleApp(fake.socket, theme=THEMES[0])
    for n in range(150):
        app.history.feed(fake.state, states.NOW - 300 + 2 * n)
    async with app.run_test(size=size) as pilot:
        while app.state.seq == 0:
            await pilot.pause(0.02)
        for theme in THEMES:
            app.theme = theme
            for name, (state, keys) in SCREENS.items():
                if state != kind or (name == "themes" and theme != THEMES[0]):
                    continue
                for key in keys:
                    app.simulate_key(key)
                    await settled(app, 1)
                while name == "logs" and "102 lines" not in "\n".join(drawn(app)[0]):
                    await asyncio.sleep(0.05)  # the log comes over a socket
                while name == "prompt" and app.screen.query_one(Previews).reading:
                    await asyncio.sleep(0.02)  # images are read in a thread
                lines, digest = await settled(app, 2)
                text = "\n".join(lines) + "\n"
                key = f"{name}-{size[0]}x{size[1]}"
                snapshot = HERE / f"{key}.txt"
                if write:
                    HERE.mkdir(exist_ok=True)
                    snapshot.write_text(text)
                    colours[f"{key} {theme}"] = digest
                elif text != snapshot.read_text():
                    wrong.append(f"{key} in {theme} is now\n{text}")
                elif colours.get(f"{key} {theme}") != digest:
                    wrong.append(f"{key}: other colours in {theme}")
                while len(app.screen_stack) > 1:
                    app.simulate_key("escape")
                    await settled(app, 1)
                app.query_one("#processes").focus()
                app.simulate_key("home")
                await settled(app, 1)
    if write:
        path.write_text(json.dumps(dict(sorted(colours.items())), indent=1) + "\n")
    assert not wrong, "\n".join(wrong)

"""A terminal whose window is being dragged: sizes come faster than they are drawn."""

import asyncio
import time
from pathlib import Path

import pytest
from textual.events import Resize
from textual.geometry import Size

from eccon.console.app import ConsoleApp
from eccon.console.screens.charts import Charts
from eccon.console.widgets.lines import Lines
from tests.console import states


def resized(width: int, height: int) -> Resize:
    return Resize(Size(width, height), Size(width, height))


async def quiet(app: ConsoleApp) -> None:
    """Waits until no size is under way any more."""
    end = time.monotonic() + 20
    calm = 0
    while calm < 20:
        waiting = app.screen.message_queue_size
        calm = 0 if waiting else calm + 1
        assert time.monotonic() < end, "sizes chase each other for ever"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("dialog", ["", "help", "prompt", "theme"])
async def test_two_sizes_at_once_end_in_the_later_one(tmp_path: Path, dialog: str) -> None:
    app = ConsoleApp(tmp_path / "none")
    app.state = states.busy()
    async with app.run_test(size=(100, 30)) as pilot:
        if dialog:
            app.act(dialog)
            await pilot.pause()
        for screen in reversed(app.screen_stack):
            screen.post_message(resized(90, 28))
            screen.call_later(app.redraw)  # else the second takes the place of the first
            screen.post_message(resized(100, 30))
        await quiet(app)
        assert app.screen.size == Size(100, 30)
        header = app.screen_stack[0].query_one("#header", Lines)
        assert header.size.width == 100


async def test_a_screen_below_others_has_the_new_size_when_it_shows_again(tmp_path: Path) -> None:
    app = ConsoleApp(tmp_path / "none")
    app.state = states.busy()
    async with app.run_test(size=(100, 30)) as pilot:
        app.act("charts")
        await pilot.pause()
        app.act("traces")
        await pilot.pause()
        await pilot.resize_terminal(80, 24)
        await quiet(app)
        await pilot.press("escape")
        await quiet(app)
        assert isinstance(app.screen, Charts)
        grid = app.screen.query_one("#grid", Lines)
        assert grid.size.width == 80
        assert {len(line) for line in grid.text.splitlines()} == {80}
        assert {len(line) for line in app.screen.query_one("#header", Lines).text.splitlines()} == {80}

"""Previews of images on a terminal that draws pictures, on one that does not, on one that is slow to say."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace
from PIL import Image
from textual.events import Paste
from textual.widgets import Input

from eccon.console import images
from eccon.console.app import ConsoleApp
from eccon.console.prompting import Run
from eccon.console.screens.prompt import Prompt
from eccon.console.widgets.previews import Previews
from eccon.console.widgets.rows import Rows
from eccon.model import TraceChanged
from eccon.prompt import samples
from tests.console import states
from tests.console.fake_daemon import FakeDaemon, running
from tests.console.graphics import ATTRIBUTES, CELL, KITTY, NAME, SIXEL, GraphicsTerminal
from tests.console.terminal import MAIN, open_console_on
from tests.console.test_screens import until

NAMES = [p.name for p in samples()]


@contextmanager
def prompting(
    answers: dict[bytes, bytes],
    *,
    env: dict[str, str] | None = None,
    size: tuple[int, int] = (100, 32),
    fields: str = "",
) -> Iterator[GraphicsTerminal]:
    """The prompt's screen on a terminal with these answers; `fields`: the images, if not the samples."""
    with (
        running(states.busy()) as daemon,
        open_console_on(GraphicsTerminal, daemon.socket, size=size, env=env) as terminal,
    ):
        terminal.answers = answers
        terminal.until("encoder-1")
        terminal.press("p")
        terminal.until("Test prompt")
        if fields:
            terminal.press(f"\t\x15{fields}")
        yield terminal


def alike(image: Image.Image, n: int) -> bool:
    """Whether it is the sample image of that number, by its mean colour and shape."""
    with Image.open(samples()[n]) as sample:
        a, b = (
            i.convert("RGB").resize((1, 1), Image.Resampling.BOX).getpixel((0, 0)) for i in (image, sample)
        )
        assert isinstance(a, tuple)
        assert isinstance(b, tuple)
        shape = (image.width / image.height) / (sample.width / sample.height)
        return 0.85 < shape < 1.15 and all(abs(x - y) < 16 for x, y in zip(a, b, strict=True))


def leave(terminal: GraphicsTerminal) -> None:
    terminal.press("\x1b")
    terminal.until(lambda: "Test prompt" not in terminal.text)


def test_kitty_draws_them_in_cells_that_are_text() -> None:
    with prompting(KITTY) as terminal:
        pictures = terminal.pictures
        terminal.until(lambda: len(pictures.kept) == len(NAMES))
        terminal.until(
            lambda: len(terminal.placeholders()) == sum(k.columns * k.rows for k in pictures.kept.values())
        )
        cells = terminal.placeholders()
        numbers = list(dict.fromkeys(number for _, (number, _, _) in sorted(cells.items())))
        top, left = min(cells)
        assert set(pictures.kept) == set(numbers)
        for n, number in enumerate(numbers):
            kept = pictures.kept[number]
            x = left + n * 9  # eight cells and a gap
            assert {at: c for at, c in cells.items() if c[0] == number} == {
                (top + r, x + c): (number, r, c) for r in range(kept.rows) for c in range(kept.columns)
            }
            assert kept.image.width <= 80
            assert kept.image.height <= 60
            assert alike(kept.image, n)
        assert pictures.sent < 12_000
        before = pictures.sent
        terminal.press("and more")  # in another field
        terminal.until("and more")
        terminal.settle()
        assert pictures.sent == before
        assert terminal.placeholders() == cells
        leave(terminal)
        terminal.until(lambda: sorted(pictures.deleted) == sorted(numbers))
        assert not terminal.placeholders()


def test_none_stays_behind_when_the_console_stops_goes_on_or_ends() -> None:
    with prompting(KITTY) as terminal:
        pictures = terminal.pictures
        terminal.until(lambda: len(pictures.kept) == len(NAMES) and len(terminal.placeholders()) > 100)
        process = psutil.Process(terminal.process.pid)
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.until(lambda: process.status() == psutil.STATUS_STOPPED)
        terminal.until(lambda: not pictures.kept)
        terminal.screen.reset()
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until(lambda: len(pictures.kept) == len(NAMES) and len(terminal.placeholders()) > 100)
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait() == 143
        assert terminal.restored()
        assert not pictures.kept
        assert terminal.output.rfind(b"a=d") < terminal.output.rfind(b"\x1b[?1049l")


def test_sixels_cover_nothing_and_come_again() -> None:
    with prompting(SIXEL, fields=f"{samples()[0]} {samples()[4]}") as terminal:
        placed = terminal.pictures.placed
        terminal.until(lambda: len(set(terminal.layer.values())) == 2 and len(terminal.layer) > 40)
        terminal.settle()
        first, second = sorted(set(terminal.layer.values()), key=lambda p: p.column)
        assert (second.row, second.column) == (first.row, first.column + 9)
        assert alike(first.image, 0)
        assert alike(second.image, 4)
        for picture in placed:
            assert not picture.over.strip()
            assert picture.image.width <= 80
            assert picture.image.height <= 60
        shown = set(terminal.layer)
        assert len(shown) > 40
        count = len(placed)
        terminal.press("\x1b[Z and more")
        terminal.until("and more")
        terminal.settle()
        assert len(placed) == count
        terminal.press("\x10")  # the palette, over the pictures
        terminal.until("Search for commands")
        terminal.until(lambda: not terminal.layer)
        terminal.press("\x1b")
        terminal.until(lambda: set(terminal.layer) == shown)
        terminal.resize(90, 30)
        terminal.layer.clear()  # another size is another screen
        terminal.until(lambda: len(terminal.layer) == len(shown))
        leave(terminal)
        terminal.settle()
        assert not terminal.layer


def test_iterm_gets_files() -> None:
    said = {NAME: b"\x1bP>|iTerm2 3.5.0\x1b\\", ATTRIBUTES: b"\x1b[?62;4c"}
    with prompting(said, fields=str(samples()[1])) as terminal:
        terminal.until(lambda: len(terminal.layer) == 24)
        assert alike(terminal.pictures.placed[-1].image, 1)
        assert terminal.pictures.placed[-1].image.format == "PNG"
        leave(terminal)
        terminal.settle()
        assert not terminal.layer


def test_half_blocks_elsewhere() -> None:
    with prompting({}) as terminal:
        terminal.until(lambda: terminal.text.count("▀") > 150)
        assert ATTRIBUTES in terminal.asked
        terminal.settle()
        assert terminal.pictures.sent == 0
        began = time.monotonic()
        leave(terminal)  # the escape key, though an answer might begin so
        assert time.monotonic() - began < 10
        terminal.press("q")
        assert terminal.wait() == 0
        assert terminal.restored()


@pytest.mark.parametrize("allowed", [True, False])
def test_through_a_real_tmux(tmp_path: Path, allowed: bool) -> None:
    config, main = tmp_path / "tmux.conf", tmp_path / "main.py"
    config.write_text(f"set -g allow-passthrough {'on' if allowed else 'off'}\nset -g status off\n")
    main.write_text(MAIN)
    with running(states.busy()) as daemon:
        env = {k: v for k, v in os.environ.items() if k not in ("TMUX", "TMUX_PANE", "NO_COLOR")}
        env |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "COLORTERM": "truecolor", "HOME": str(tmp_path)}
        server = ["tmux", "-S", str(daemon.socket.with_name("tmux"))]
        console = [sys.executable, str(main), str(daemon.socket)]
        terminal = GraphicsTerminal([*server, "-f", str(config), "new-session", *console], env, 100, 32)
        terminal.answers = KITTY
        try:
            terminal.until("encoder-1")
            terminal.press("p")
            if allowed:
                terminal.until(lambda: len(terminal.pictures.kept) == len(NAMES))
                terminal.until(lambda: all(kept.whole for kept in terminal.pictures.kept.values()))
                kept = set(terminal.pictures.kept)
                terminal.until(lambda: {n for n, _, _ in terminal.placeholders().values()} == kept)
                leave(terminal)
                terminal.until(lambda: not terminal.pictures.kept)
            else:
                terminal.until(lambda: terminal.text.count("▀") > 150)
                terminal.settle()
                assert terminal.pictures.sent == 0
            terminal.press("\x1b" if not allowed else "")
            terminal.until(lambda: "Test prompt" not in terminal.text)
            terminal.press("q")
            assert terminal.wait() == 0
        finally:
            subprocess.run([*server, "kill-server"], capture_output=True)
            if terminal.process.poll() is None:
                terminal.process.kill()
            terminal.process.wait(10)
            terminal.hang_up()


def test_late_and_broken_answers_are_not_typed() -> None:
    with prompting({}) as terminal:
        terminal.until(lambda: ATTRIBUTES in terminal.asked and "▀" in terminal.text)
        text = next(line for line in terminal.lines if "Briefly" in line)
        for piece in (
            b"\x1bP>|kit",
            b"ty(0.3",
            b"5.2)\x1b",
            b"\\\x1b[6;20",
            b";10t\x1b[6;",
            b"\x1b[?",
            b"62;4;2",
            b"\x1b[?62;22c",
        ):
            os.write(terminal.master, piece)
            terminal.read(0.04)
        terminal.until(lambda: len(terminal.placeholders()) > 100)
        terminal.press("!")
        terminal.until("images.!")
        assert next(line for line in terminal.lines if "Briefly" in line) == text.replace("s. ", "s.!", 1)
        assert CELL in terminal.asked


@pytest.mark.parametrize("name", ["NO_COLOR", "ECCON_ASCII", "ECCON_LOW_BANDWIDTH"])
def test_none_where_they_would_be_nothing_or_dear(tmp_path: Path, name: str) -> None:
    assert ConsoleApp(tmp_path / "none", environ={"TERM": "xterm"}).previews
    assert not ConsoleApp(tmp_path / "none", environ={"TERM": "xterm", name: "1"}).previews


async def test_none_where_none_are_wanted(daemon: FakeDaemon, own_home: Path) -> None:
    (own_home / "config" / "eccon").mkdir(parents=True)
    (own_home / "config" / "eccon" / "console.toml").write_text('images = "off"\n')
    app = ConsoleApp(daemon.socket)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: bool(app.state.processes))
        await pilot.press("p")
        await until(lambda: isinstance(app.screen, Prompt))
        await until(lambda: app.screen.query_one("#images", Input).value == "samples")
        await pilot.pause()
        assert app.screen.query_one(Previews).size.height == 0


async def test_what_is_no_image_is_named(daemon: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "b[x].png").write_bytes(b"\x89PNG no")
    app = ConsoleApp(daemon.socket)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: bool(app.state.processes))
        await pilot.press("p")
        await until(lambda: isinstance(app.screen, Prompt))
        app.screen.query_one("#images", Input).value = f"'{tmp_path}/b[x].png' {samples()[0]}"
        await until(lambda: "b[x].png" in app.screen.query_one(Previews).text)
        await until(lambda: "▀" in app.screen.query_one(Previews).text)


async def test_files_are_dropped_one_after_another(daemon: FakeDaemon, tmp_path: Path) -> None:
    for name in ("a b.png", "c.png"):
        Image.new("RGB", (8, 8), "red").save(tmp_path / name)
    app = ConsoleApp(daemon.socket)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: bool(app.state.processes))
        await pilot.press("p")
        await until(lambda: isinstance(app.screen, Prompt))
        field = app.screen.query_one("#images", Input)
        field.value = ""
        field.focus()
        for text in (
            f"{tmp_path}/a b.png\n",
            f"file://{tmp_path}/a%20b.png",
            f"{tmp_path}/c.png\r\nsamples:1",
        ):
            app.post_message(Paste(text))
        await until(lambda: field.value.endswith("samples:1 "))
        assert images.expand(field.value) == [
            f"{tmp_path}/a b.png",
            f"{tmp_path}/a b.png",
            f"{tmp_path}/c.png",
            str(samples()[0]),
        ]
        await until(lambda: "▀" in app.screen.query_one(Previews).text)
        field.value = f"{tmp_path}/a"
        field.cursor_position = len(field.value)
        await until(lambda: field._suggestion.endswith("a\\ b.png"))
        await pilot.press("right")
        assert field.value == f"{tmp_path}/a\\ b.png"


async def test_a_copy_is_no_fault_and_repeated_images_are_told(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    app = ConsoleApp(daemon.socket)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: bool(app.state.processes))
        await pilot.press("p")
        await until(lambda: isinstance(app.screen, Prompt))
        screen = app.screen
        assert isinstance(screen, Prompt)
        await pilot.press("ctrl+y")
        answer = screen.query_one("#answer", Rows)
        await until(lambda: "curl: " in answer.text)
        assert (screen.problem, screen.copied[0][1]) == ("", "ok")
        screen.run = Run("console-abc", 1)
        screen.run.end()
        trace = replace(states.trace_of(77, time.time(), images=2), id="console-abc", items=3)
        daemon.change(TraceChanged(seq=900, trace=trace))
        await until(lambda: app.trace("console-abc") is not None)
        screen.draw()
        await until(lambda: "3 the same as an earlier one" in answer.text)

"""The first frame: what the app then draws; the terminal is given back whatever happens; no key is lost."""

import signal
import time
from pathlib import Path

import psutil
import pytest
from textual._compositor import LayoutUpdate

from eccon.console import actions, firstframe, opening, setup
from eccon.console.app import ConsoleApp
from eccon.console.draw import glance
from eccon.console.draw.shape import Shape
from eccon.console.paint import Cell, Painter
from eccon.console.source import OF_RECORDINGS
from eccon.model import ClusterState
from tests.console import states
from tests.console.fake_daemon import running
from tests.console.terminal import MAIN, open_console

SIZES = (
    (32, 8),
    (60, 13),
    (80, 24),
    (99, 27),
    (110, 29),
    (120, 36),
    (120, 42),
    (150, 39),
    (160, 45),
    (200, 60),
)
STATES = {
    f.__name__: f
    for f in (states.busy, states.degraded, states.starting, states.hostile, states.on_npus, states.many)
}


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch, utc: None) -> None:
    monkeypatch.setattr(time, "time", lambda: states.NOW)


def early(state: ClusterState, size: tuple[int, int], environ: dict[str, str], theme: str | None) -> Painter:
    ready = setup.setup(theme, environ)
    shape = Shape(*size, ready.low_bandwidth)
    footer = [a for a in actions.footer("overview") if a.name not in OF_RECORDINGS]
    scene = glance.Scene(state, shape, states.NOW, 300, "", footer, {})
    painter = Painter(opening.colour_system(environ))
    painter.resize(*size)
    firstframe.paint(glance.blocks(scene), ready, painter, boxed=shape.boxed)
    return painter


async def late(
    state: ClusterState, size: tuple[int, int], environ: dict[str, str], theme: str | None
) -> Painter:
    app = ConsoleApp(Path("none"), theme=theme, environ=environ)
    app.painter.system = opening.colour_system(environ)
    app.state = state
    app.history.feed(state, states.NOW)
    app._connect = lambda: None  # type: ignore[method-assign]
    async with app.run_test(size=size) as pilot:
        for _ in range(3):
            await pilot.pause()
            app.redraw()
        await pilot.pause()
        update = app.screen._compositor.render_update(full=True)
        assert isinstance(update, LayoutUpdate)
        app.painter.resize(*size)
        app.painter.paint(update)
    return app.painter


def as_near(one: Cell, other: Cell) -> bool:
    """The same but for the last digit of a colour: Textual reads some by a way of its own."""
    numbers = [[int(n) for code in codes[1:] for n in code.split(";")] for _, codes in (one, other)]
    return (
        (one[0], one[1][0]) == (other[0], other[1][0])
        and len(numbers[0]) == len(numbers[1])
        and all(abs(a - b) <= 1 for a, b in zip(*numbers, strict=True))
    )


def assert_same(before: Painter, after: Painter) -> None:
    for y, (was, shown) in enumerate(zip(before._screen, after._screen, strict=True)):
        assert "".join(c for c, _ in was) == "".join(c for c, _ in shown), y
        wrong = [(x, a, b) for x, (a, b) in enumerate(zip(was, shown, strict=True)) if not as_near(a, b)]
        assert not wrong, (y, wrong[:3])


PLAIN = {"COLORTERM": "truecolor", "TERM": "xterm-256color"}
LOOKS: tuple[tuple[dict[str, str], str | None], ...] = (
    (PLAIN, "eccon-dark"),
    (PLAIN, "eccon-light"),
    (PLAIN, "high-contrast"),
    ({"TERM": "xterm-256color"}, "colour-blind-safe"),
    ({"TERM": "linux"}, "ansi"),
    (PLAIN | {"NO_COLOR": "1"}, None),
    (PLAIN | {"ECCON_ASCII": "1"}, None),
    (PLAIN | {"ECCON_LOW_BANDWIDTH": "1"}, None),
)


@pytest.mark.parametrize("n", range(len(SIZES)), ids=[f"{w}x{h}" for w, h in SIZES])
async def test_the_app_draws_the_same(n: int, frozen: None) -> None:
    environ, theme = LOOKS[n % len(LOOKS)]
    state = list(STATES.values())[n % len(STATES)]()
    assert_same(early(state, SIZES[n], environ, theme), await late(state, SIZES[n], environ, theme))


STUCK = MAIN.replace(
    "sys.exit(",
    """import importlib.abc, time
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "eccon.console.app":
            time.sleep(60)
sys.meta_path.insert(0, Slow())
sys.exit(""",
)
"""A console that does not get beyond its first frame."""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGQUIT, 131)],
)
def test_a_signal_before_the_app_is_there_leaves_the_terminal_as_it_was(
    number: signal.Signals, code: int
) -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket, main=STUCK) as terminal:
        terminal.until("encoder-1")
        terminal.process.send_signal(number)
        assert terminal.wait() == code
        assert terminal.restored()


def test_it_stops_as_a_job_before_the_app_is_there() -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket, main=STUCK) as terminal:
        terminal.until("encoder-1")
        process = psutil.Process(terminal.process.pid)
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.until(lambda: process.status() == psutil.STATUS_STOPPED)
        terminal.read(0.2)
        assert terminal.restored()
        terminal.screen.reset()
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until("encoder-1")


def test_an_app_that_cannot_be_imported_gives_the_terminal_back() -> None:
    broken = STUCK.replace("time.sleep(60)", "raise ImportError('boom')")
    with running(states.busy()) as daemon, open_console(daemon.socket, main=broken) as terminal:
        assert terminal.wait() == 1
        assert terminal.restored()
        assert b"boom" in terminal.output[terminal.output.rfind(b"\x1b[?1049l") :]


def test_the_app_takes_over_without_a_blank_and_with_the_keys_typed_before() -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket, size=(160, 45)) as terminal:
        terminal.until("encoder-1")
        first = len(terminal.output)
        terminal.press("t")
        terminal.until(lambda: "encoder-1" not in terminal.text and "req-7f39" in terminal.text)
        assert terminal.output.count(b"\x1b[?1049h") == 1
        assert b"\x1b[2J" not in terminal.output[first:]


def test_the_app_sends_only_what_differs() -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket, size=(160, 45)) as terminal:
        terminal.until("encoder-1")
        terminal.until(lambda: daemon.streams == 1)
        frame = terminal.output.index(b"leave")
        terminal.settle()
        assert len(terminal.output) - frame < frame / 2


def test_a_daemon_that_does_not_answer_at_once_is_waited_for_by_the_app(tmp_path: Path) -> None:
    with open_console(tmp_path / "none") as terminal:
        terminal.until("no daemon")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait() == 143
        assert terminal.restored()

"""Each action of the table, by its key on each of its screens: what it says it does comes about."""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot

from eccon.console import actions
from eccon.console.actions import Action
from eccon.console.app import ConsoleApp
from eccon.console.replay import Replay
from eccon.console.screens.base import ConsoleScreen
from eccon.console.screens.charts import Charts
from eccon.console.screens.detail import Detail
from eccon.console.screens.dialogs import AskLine, Choice, Help, Jump, Leave
from eccon.console.screens.events import Events
from eccon.console.screens.logs import ALL, Logs
from eccon.console.screens.output import Output
from eccon.console.screens.overview import Overview
from eccon.console.screens.prompt import Prompt
from eccon.console.screens.themes import ThemeChoice
from eccon.console.screens.trace import TraceScreen
from eccon.console.screens.traces import Traces
from eccon.console.widgets.rows import Rows
from tests.console import states
from tests.console.fake_daemon import FakeDaemon, running

TARGET = "encoder-1"
TRACE = "req-beef"
OF_A_TERMINAL = {"mouse", "redraw"}
"""Shown on a pseudo-terminal, where their bytes can be seen."""

There = Callable[[], object]


class Stage:
    """A screen before its key is pressed."""

    def __init__(self, app: ConsoleApp, pilot: Pilot[int], daemon: FakeDaemon) -> None:
        self.app, self.pilot, self.daemon = app, pilot, daemon

    @property
    def logs(self) -> Logs:
        """The screen of a log."""
        assert isinstance(self.app.screen, Logs)
        return self.app.screen

    @property
    def said(self) -> str:
        """What stands in the footer's place."""
        return "".join(text for text, _ in self.app.message)

    async def until(self, there: There, what: str) -> None:
        end = time.monotonic() + 30
        while not there():
            assert time.monotonic() < end, (what, self.said, self.app.screen, self.daemon.requests[-3:])
            await asyncio.sleep(0.01)

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.pilot.press(key)

    async def go(self, scope: str) -> None:
        """To a screen, with its target chosen: an encoder, or a request."""
        app = self.app
        app.acknowledged.clear()
        while len(app.screen_stack) > 1 and not self._untouched(scope):
            app.pop_screen()
        app.say("")
        if len(app.screen_stack) > 1:
            return
        screen = app.screen
        assert isinstance(screen, Overview)
        if screen.words:
            app.act("back")
        screen.processes.focus()
        await self.until(lambda: TARGET in screen.processes.keys, "the table")
        screen.processes.choose(TARGET)
        open_it: dict[str, Callable[[], None]] = {
            "overview": lambda: None,
            "charts": lambda: app.act("charts"),
            "detail": lambda: app.open_detail(TARGET),
            "traces": lambda: app.act("traces"),
            "trace": lambda: app.open_trace(TRACE),
            "logs": lambda: app.open_logs(TARGET),
            "events": lambda: app.act("events"),
        }
        open_it[scope]()
        await self.pilot.pause()
        there = app.screen
        assert isinstance(there, ConsoleScreen)
        assert scope == there.SCOPE
        if scope in ("traces", "events"):
            rows = there.query_one("#list", Rows)
            await self.until(lambda: len(rows.keys) > 3, "the list")
            if scope == "traces":
                rows.choose(TRACE)
            else:
                rows.choose(next(k for k in rows.keys if app.state.process(k.split(":")[1])))
        if scope == "logs":
            await self.until(lambda: self.logs.view.count >= 3, "the log")

    def _untouched(self, scope: str) -> bool:
        """Whether this is the screen with its target; one with a filter or a search is opened anew."""
        screen = self.app.screen
        same = isinstance(screen, ConsoleScreen) and scope == screen.SCOPE
        changed = getattr(screen, "words", "") or getattr(screen, "only", "")
        return same and not changed and process_shown(self) in ("", TARGET)


def opens(kind: type) -> Callable[[Stage], There]:
    return lambda s: lambda: isinstance(s.app.screen, kind)


def sends(request: str) -> Callable[[Stage], There]:
    def effect(s: Stage) -> There:
        before = s.daemon.requests.count(request)
        return lambda: s.daemon.requests.count(request) == before + 1

    return effect


def differs(value: Callable[[Stage], object]) -> Callable[[Stage], There]:
    def effect(s: Stage) -> There:
        before = value(s)
        return lambda: value(s) != before

    return effect


def says(words: str) -> Callable[[Stage], There]:
    return lambda s: lambda: words in s.said


def writes(name: str) -> Callable[[Stage], There]:
    return lambda _: lambda: any(p.stat().st_size > 10 for p in Path().glob(name))


def held(s: Stage) -> object:
    screen = s.app.screen
    return screen.view.top is None if isinstance(screen, Logs) else getattr(screen, "held", None) is None


def process_shown(s: Stage) -> str:
    return str(getattr(s.app.screen, "process_name", ""))


def only(s: Stage) -> There:
    before = len(s.daemon.requests)
    return lambda: any("grep=INFO" in r for r in s.daemon.requests[before:])


def older(s: Stage) -> There:
    before = s.logs._asked
    return lambda: s.logs._asked == before * 10


def goes_back(s: Stage) -> There:
    if isinstance(s.app.screen, Overview):
        return lambda: isinstance(s.app.screen, Overview) and not s.app.screen.words
    return lambda: isinstance(s.app.screen, Overview)


EFFECTS: dict[str, Callable[[Stage], There]] = {
    "restart": sends(f"POST /v1/processes/{TARGET}/restart"),
    "add": sends("POST /v1/encoders"),
    "prompt": opens(Prompt),
    "stop": sends(f"POST /v1/processes/{TARGET}/stop"),
    "start": sends(f"POST /v1/processes/{TARGET}/start"),
    "kill": sends(f"POST /v1/processes/{TARGET}/stop?force=true"),
    "remove": sends(f"DELETE /v1/encoders/{TARGET}"),
    "drain": sends(f"POST /v1/encoders/{TARGET}/drain"),
    "resume": sends(f"POST /v1/encoders/{TARGET}/resume"),
    "up": sends("POST /v1/up"),
    "down": sends("POST /v1/down"),
    "roll": sends("POST /v1/encoders/restart"),
    "restart_pd": sends("POST /v1/processes/pd/restart"),
    "scale": sends("POST /v1/encoders/scale?count=9"),
    "doctor": opens(Output),
    "diagnostics": writes("eccon-lab-*.tar.gz"),
    "reload": sends("POST /v1/reload"),
    "traces": opens(Traces),
    "logs": opens(Logs),
    "events": opens(Events),
    "charts": opens(Charts),
    "filter": lambda s: lambda: getattr(s.app.screen, "words", "") == "9",
    "window": differs(lambda s: s.app.window),
    "acknowledge": lambda s: lambda: s.app.acknowledged == {a.key for a in s.app.state.alarms},
    "attend": lambda s: (
        lambda: (
            isinstance(s.app.screen, Overview)
            and s.app.screen.processes.chosen == s.app.state.alarms[0].subject
        )
    ),
    "back": goes_back,
    "pause": differs(held),
    "copy": says("copied, and in"),
    "export": writes(f"trace-{TRACE}.json"),
    "chrome": writes(f"trace-{TRACE}-chrome.json"),
    "help": opens(Help),
    "palette": opens(CommandPalette),
    "jump": opens(Jump),
    "faster": says("this is no recording"),
    "slower": says("this is no recording"),
    "hold": says("this is no recording"),
    "theme": opens(ThemeChoice),
    "bell": differs(lambda s: s.app.bell_on),
    "notify": differs(lambda s: s.app.notify_by),
    "quit": opens(Leave),
    "search": lambda s: lambda: isinstance(s.app.screen, Logs) and s.logs.view.pattern is not None,
    "next": differs(lambda s: s.logs._place),
    "previous": differs(lambda s: s.logs._place),
    "wrap": differs(lambda s: s.logs.view.folded),
    "times": differs(lambda s: s.logs.view.timed),
    "merged": lambda s: lambda: process_shown(s) == ALL,
    "only": only,
    "level": differs(lambda s: s.logs.view.least),
    "older": older,
    "forward": lambda s: lambda: process_shown(s) == "encoder-2",
    "backward": lambda s: lambda: process_shown(s) == "encoder-0",
}

TYPED = {"filter": "9", "scale": "9", "search": "INFO", "only": "INFO"}
"""What is typed into the line that opens."""


def opened(scope: str) -> Callable[[Stage], There]:
    """What enter opens: on the overview and from an event a process, from the list a request."""
    return opens(TraceScreen if scope == "traces" else Detail)


async def carry_out(stage: Stage, scope: str, action: Action, key: str) -> None:
    """Presses a key of an action, answers what it asks, and waits for its effect."""
    await stage.go(scope)
    app = stage.app
    what = f"{action.name} by {key} on {scope}"
    if action.name in ("next", "previous"):
        await stage.press("slash", *"INFO", "enter")
    there = (opened(scope) if action.name == "open" else EFFECTS[action.name])(stage)
    assert not there() or action.name == "back", what
    await stage.press(key)
    if action.name in TYPED:
        await stage.until(lambda: isinstance(app.screen, AskLine), what)
        await stage.press(*TYPED[action.name], "enter")
    if action.ask:
        await stage.until(lambda: isinstance(app.screen, Choice), what)
        assert isinstance(app.screen, Choice)
        assert app.screen.answers[app.screen.at][1] == "No", what
        if action.target:
            assert TARGET in app.screen.question, what
        await stage.press("y")
    await stage.until(there, what)


@pytest.mark.parametrize("scope", actions.SCOPES)
async def test_every_key_of_a_screen_does_what_its_action_says(
    scope: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "eccon.toml"
    config.write_text("nonsense = [")
    table = [a for a in actions.in_scope(scope) if a.name not in OF_A_TERMINAL]
    assert {a.name for a in table} <= {*EFFECTS, "open"}
    state = states.degraded()
    cluster = msgspec.structs.replace(state.cluster, config_path=str(config))
    with running(msgspec.structs.replace(state, cluster=cluster)) as daemon:
        daemon.log = [f"INFO line {n}" for n in range(30)]
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where copies are kept
        app = ConsoleApp(daemon.socket)
        async with app.run_test(size=(80, 24)) as pilot:
            stage = Stage(app, pilot, daemon)
            await stage.until(lambda: bool(app.state.processes), "the state")
            for action in table:
                for key in action.keys.split(","):
                    await carry_out(stage, scope, action, key)


async def test_the_keys_of_a_recording_move_its_clock(tmp_path: Path) -> None:
    app = ConsoleApp(tmp_path / "none", source=lambda: Replay(tmp_path / "none"))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        replay = app.link
        assert isinstance(replay, Replay)
        for key, speed in (("plus", 2.0), ("minus", 1.0), ("minus", 0.5)):
            await pilot.press(key)
            assert replay.speed == speed
        await pilot.press("full_stop")
        assert replay.held
        await pilot.press("full_stop")
        assert not replay.held

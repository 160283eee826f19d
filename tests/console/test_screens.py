"""What the keys of each screen do, with the daemon behind a real socket and the app without a terminal."""

import asyncio
import json
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from eccon.console.app import ConsoleApp
from eccon.console.prompting import new_run
from eccon.console.screens.base import ConsoleScreen
from eccon.console.screens.charts import Charts
from eccon.console.screens.detail import Detail
from eccon.console.screens.dialogs import AskLine, Choice
from eccon.console.screens.logs import Logs
from eccon.console.screens.output import Output
from eccon.console.screens.overview import Overview
from eccon.console.screens.prompt import Prompt
from eccon.console.screens.trace import TraceScreen
from eccon.console.screens.traces import Traces
from eccon.console.widgets.lines import Lines
from eccon.console.widgets.logview import LogView
from eccon.console.widgets.rows import Rows
from eccon.model import ClusterChanged, ProcessGone, TraceChanged
from tests.console import states
from tests.console.fake_daemon import FakeDaemon, running

Watched = tuple[ConsoleApp, Pilot[int]]


@asynccontextmanager
async def watching(
    fake: FakeDaemon, size: tuple[int, int] = (120, 36), wait_for: str = "encoder-3", **options: bool
) -> AsyncIterator[Watched]:
    app = ConsoleApp(fake.socket, **options)  # type: ignore[arg-type]
    async with app.run_test(size=size) as pilot:
        await until(lambda: bool(app.state.processes))
        await until(lambda: wait_for in screen_text(app))
        yield app, pilot


async def until(there: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "not in time"
        await asyncio.sleep(0.02)


def screen_text(app: ConsoleApp) -> str:
    return "\n".join(w.text for w in app.screen.query(Lines) if w.size.height)


async def press(pilot: Pilot[int], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
    await pilot.pause()


async def test_the_cursor_stays_on_its_row_whatever_moves(daemon: FakeDaemon) -> None:
    async with watching(daemon) as (app, pilot):
        await press(pilot, "down", "down", "down")
        rows = app.screen.query_one("#processes", Rows)
        assert rows.chosen == "encoder-1"
        daemon.change(ProcessGone(seq=100, name="encoder-0"))
        await until(lambda: "encoder-0" not in rows.keys)
        assert rows.chosen == "encoder-1"
        await press(pilot, "r")
        screen = app.screen
        assert isinstance(screen, Choice)
        assert screen.question == "Restart encoder-1?"
        daemon.change(ProcessGone(seq=101, name="encoder-1"))
        await until(lambda: app.state.process("encoder-1") is None)
        await press(pilot, "y")
        await until(lambda: "POST /v1/processes/encoder-1/restart" in daemon.requests)


@pytest.mark.parametrize(
    ("keys", "request_"),
    [
        (("s", "y"), "POST /v1/processes/encoder-0/stop"),
        (("S",), "POST /v1/processes/encoder-0/start"),
        (("K", "y"), "POST /v1/processes/encoder-0/stop?force=true"),
        (("x", "y"), "DELETE /v1/encoders/encoder-0"),
        (("a", "y"), "POST /v1/encoders"),
        (("U",), "POST /v1/up"),
        (("D", "y"), "POST /v1/down"),
        (("f5", "y"), "POST /v1/reload"),
        (("d", "y"), "POST /v1/encoders/encoder-0/drain"),
        (("u",), "POST /v1/encoders/encoder-0/resume"),
        (("R", "y"), "POST /v1/encoders/restart"),
        (("P", "y"), "POST /v1/processes/pd/restart"),
    ],
)
async def test_actions_reach_the_daemon(daemon: FakeDaemon, keys: tuple[str, ...], request_: str) -> None:
    async with watching(daemon) as (_, pilot):
        await press(pilot, "down", "down", *keys)
        await until(lambda: request_ in daemon.requests)


async def test_only_an_encoder_is_removed(daemon: FakeDaemon) -> None:
    async with watching(daemon) as (app, pilot):
        await press(pilot, "x")
        assert isinstance(app.screen, Overview)
        assert "is no encoder" in "".join(t for t, _ in app.message)


async def test_scale_asks_how_many_and_what_it_costs(daemon: FakeDaemon) -> None:
    async with watching(daemon) as (app, pilot):
        await press(pilot, "N", "backspace", "x", "enter")
        await until(lambda: "no number" in "".join(t for t, _ in app.message))
        await press(pilot, "N", "backspace", "4", "enter")
        screen = app.screen
        assert isinstance(screen, Choice)
        assert screen.question == "Scale to 4 encoders?"
        assert screen.lines[0] == "encoder-4, encoder-5 leave the cluster"
        await press(pilot, "enter")  # No is the default
        assert not [r for r in daemon.requests if r.startswith("POST")]
        await press(pilot, "N", "backspace", "9", "enter", "y")
        await until(lambda: "POST /v1/encoders/scale?count=9" in daemon.requests)


async def test_the_diagnostics_bundle_is_written_for_its_owner(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with watching(daemon) as (app, pilot):
        await press(pilot, "f9")
        await until(lambda: " KiB in " in "".join(t for t, _ in app.message))
        (bundle,) = tmp_path.glob("eccon-lab-*.tar.gz")
        assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
        assert bundle.read_bytes() == b'{"name":"encoder-9"}'
        monkeypatch.chdir("/proc")
        await press(pilot, "f9")
        await until(lambda: "not written, No such file" in "".join(t for t, _ in app.message))


async def test_a_command_runs_beside_the_console(daemon: FakeDaemon, tmp_path: Path) -> None:
    config = tmp_path / "eccon.toml"
    config.write_text("nonsense = [")
    async with watching(daemon) as (app, pilot):
        await press(pilot, "f8")
        await until(lambda: "not on this machine" in "".join(t for t, _ in app.message))
        app.push_screen(Output("Check", ["-f", str(config), "config", "check"]))
        await until(lambda: "ended with 2" in screen_text(app), 20)
        assert "eccon.toml:1" in "".join(screen_text(app).split())  # a long path is folded
        await press(pilot, "escape")
        await until(lambda: isinstance(app.screen, Overview))
        cluster = msgspec.structs.replace(
            app.state.cluster, config_path=str(config), state_dir=str(tmp_path / "s" / "lab")
        )
        daemon.change(ClusterChanged(seq=400, cluster=cluster, alarms=()))
        await until(lambda: app.state.cluster.state_dir)
        await press(pilot, "f8")
        screen = app.screen
        assert isinstance(screen, Output)
        assert screen.environ == {"ECCON_STATE_DIR": str(tmp_path / "s")}
        await press(pilot, "escape")


async def test_filters_are_live_and_escape_takes_them_back(daemon: FakeDaemon) -> None:
    async with watching(daemon) as (app, pilot):
        rows = app.screen.query_one("#processes", Rows)
        await press(pilot, "slash")
        assert isinstance(app.screen, AskLine)
        await press(pilot, *"stalled")
        await until(lambda: rows.keys == ["encoder-3"])
        await press(pilot, "escape")
        await until(lambda: len(rows.keys) == 8)
        await press(pilot, "slash", *"load", "enter")
        await until(lambda: rows.keys == ["encoder-4"])
        await press(pilot, "escape")
        await until(lambda: len(rows.keys) == 8)


async def test_traces_pause_filter_open_and_export(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with watching(daemon) as (app, pilot):
        await press(pilot, "t")
        rows = app.screen.query_one("#list", Rows)
        await until(lambda: rows.keys[0] == "req-7f40")
        await press(pilot, "space")
        daemon.change(TraceChanged(seq=200, trace=states.trace_of(9999, states.NOW + 1)))
        await until(lambda: len(app.state.traces) == 44)
        await until(lambda: "paused, 1 new" in screen_text(app))
        assert rows.keys[0] == "req-7f40"
        await press(pilot, "space")
        await until(lambda: rows.keys[0] == "req-270f")
        await press(pilot, "slash", *"beef", "enter")
        await until(lambda: rows.keys == ["req-beef"])
        await press(pilot, "E")
        assert json.loads((tmp_path / "trace-req-beef.json").read_text())["id"] == "req-beef"
        await press(pilot, "enter")
        assert isinstance(app.screen, TraceScreen)
        await until(lambda: "timed out" in screen_text(app))
        await press(pilot, "C")
        events = json.loads((tmp_path / "trace-req-beef-chrome.json").read_text())["traceEvents"]
        assert any(e["name"] == "pull" for e in events)
        await press(pilot, "down", "down", "down", "l")
        assert isinstance(app.screen, Logs)
        assert (app.screen.process_name, app.screen.words) == ("encoder-2", "a2")
        await press(pilot, "escape", "escape", "escape")
        assert isinstance(app.screen, Overview)


async def test_what_cannot_be_written_is_said_and_leaves_nothing(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    (tmp_path / "trace-req-beef.json").symlink_to("/dev/full")
    async with watching(daemon) as (app, pilot):
        app.open_trace("req-beef")
        await pilot.pause()
        await press(pilot, "E")
        await until(lambda: "not written, No space left" in "".join(t for t, _ in app.message))
        await press(pilot, "y")
        await until(lambda: "copied, but in no file: No such file" in "".join(t for t, _ in app.message))
        assert not list(tmp_path.iterdir())
        app.copy("x" * 60_000, "much")
        await until(lambda: "too long for the clipboard, and in no" in "".join(t for t, _ in app.message))


async def test_logs_follow_search_level_and_turn(daemon: FakeDaemon) -> None:
    daemon.log = [f"INFO line {n}" for n in range(300)] + ["ERROR broke", "  at once", "WARNING soon"]
    async with watching(daemon) as (app, pilot):
        await press(pilot, "down", "down", "l")
        view = app.screen.query_one(LogView)
        await until(lambda: len(view.lines_kept) == 303)
        assert "WARNING soon" in view.text
        await press(pilot, "slash", *"line 29", "enter")
        await until(lambda: "11/11" in screen_text(app))
        await press(pilot, "n")
        await until(lambda: "1/11" in screen_text(app))
        assert "line 29" in view.text
        await press(pilot, "N", "N")
        await until(lambda: "10/11" in screen_text(app))
        await press(pilot, "v", "v", "v")
        assert [line.strip() for line in view.text.splitlines()] == ["ERROR broke", "at once"]
        await press(pilot, "right_square_bracket")
        await until(lambda: any("/v1/logs/encoder-1" in r for r in daemon.requests))
        await press(pilot, "left_square_bracket", "left_square_bracket", "left_square_bracket")
        await until(lambda: any("/v1/logs/pd" in r or "/v1/logs/proxy" in r for r in daemon.requests))


async def test_a_broken_pattern_is_said(daemon: FakeDaemon) -> None:
    async with watching(daemon) as (app, pilot):
        await press(pilot, "l", "slash", *"/(/", "enter")
        await until(lambda: "unterminated" in "".join(t for t, _ in app.message))


def test_a_flood_of_lines_is_bounded_and_quick() -> None:
    view = LogView()
    began = time.perf_counter()
    for _ in range(10):
        view.add([f"INFO {n}" for n in range(5000)])
    assert len(view.lines_kept) == 20_000
    assert view.dropped == 30_000
    assert time.perf_counter() - began < 2


async def test_details_of_each_process(daemon: FakeDaemon) -> None:
    async with watching(daemon) as (app, pilot):
        await press(pilot, "enter")
        assert isinstance(app.screen, Detail)
        await until(lambda: "epoch" in screen_text(app))
        for _ in range(7):
            await press(pilot, "right_square_bracket")
        await until(lambda: "Last lines" in screen_text(app))
        assert "killed by signal 9" in screen_text(app)
        daemon.change(ProcessGone(seq=300, name="encoder-5"))
        await until(lambda: "left the cluster" in screen_text(app))


async def test_alarms_are_acknowledged_and_stay_listed(daemon: FakeDaemon) -> None:
    async with watching(daemon) as (app, pilot):
        strip = app.screen.query_one("#alarms", Lines)
        await until(lambda: "held 4 items" in strip.text)
        assert "r restart" in " ".join(strip.text.split())
        await press(pilot, "A")
        await until(lambda: strip.size.height == 0)
        await press(pilot, "e")
        await until(lambda: "held 4 items" in screen_text(app))
        cluster = app.state.cluster
        daemon.change(ClusterChanged(seq=400, cluster=cluster, alarms=()))
        await until(lambda: not app.acknowledged)


async def test_the_alarm_about_the_chosen_process_is_shown_where_one_has_room(daemon: FakeDaemon) -> None:
    async with watching(daemon, (80, 24)) as (app, pilot):
        strip = app.screen.query_one("#alarms", Lines)
        await until(lambda: "encoder-3: has held" in strip.text)
        await press(pilot, "exclamation_mark", "exclamation_mark")
        await until(lambda: "encoder-5: died 3 times" in strip.text)
        assert "+1" in strip.text
        assert " l logs " in strip.text
        await press(pilot, "g")
        await until(lambda: "encoder-3: has held" in strip.text)


async def test_jump_goes_to_a_pane(daemon: FakeDaemon) -> None:
    async with watching(daemon) as (app, pilot):
        await press(pilot, "J", "b")
        assert app.focused is not None
        assert app.focused.id == "traces"
        chosen = app.screen.query_one("#traces", Rows).chosen
        await press(pilot, "enter")
        screen = app.screen
        assert isinstance(screen, TraceScreen)
        assert screen.trace_id == chosen
        await press(pilot, "escape", "l")
        logs = app.screen
        assert isinstance(logs, Logs)
        trace = app.trace(chosen or "")
        assert trace is not None
        assert logs.words in {trace.id, *(s.uuid for s in trace.spans)}
        await press(pilot, "escape", "J")
        titles = {p.border_title for p in app.screen_stack[0].query(".panel") if p.size.height}
        assert len({str(t)[:3] for t in titles}) == len(titles)
        assert all(str(t).startswith("(") for t in titles)
        await press(pilot, "d")
        assert isinstance(app.screen, Charts)


async def test_a_key_for_a_dialog_does_not_reach_the_screen_below(daemon: FakeDaemon) -> None:
    async with watching(daemon) as (app, pilot):
        await press(pilot, "q")
        assert type(app.screen).__name__ == "Leave"
        await press(pilot, "c")
        assert isinstance(app.screen, Overview)
        await press(pilot, "t", "l", "slash", "n", "q", "escape")
        assert isinstance(app.screen, ConsoleScreen)
        assert not [r for r in daemon.requests if r.startswith(("POST", "DELETE"))]


async def test_a_load_is_counted(daemon: FakeDaemon) -> None:
    daemon.answer = [
        b'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n',
    ]
    async with watching(daemon) as (app, pilot):
        await press(pilot, "p")
        screen = app.screen
        assert isinstance(screen, Prompt)
        screen.query_one("#images", Input).value = ""
        screen.query_one("#load", Input).value = "12x4"
        await press(pilot, "enter")
        await until(lambda: screen.run is not None and screen.run.over)
        assert screen.run is not None
        assert (screen.run.done, screen.run.failed, screen.run.tokens) == (12, 0, 84)
        await until(lambda: "12/12 answered" in screen_text(app))
        screen.query_one("#load", Input).value = "x"
        await press(pilot, "enter")
        await until(lambda: "neither like" in screen_text(app))
        screen.query_one("#load", Input).value = "1"
        screen.query_one("#images", Input).value = "/nowhere.png"
        await press(pilot, "enter")
        await until(lambda: "cannot be read" in screen_text(app))
        daemon.refusal = "the PD is down [/]"
        screen.query_one("#images", Input).value = ""
        await press(pilot, "enter")
        await until(lambda: "the PD is down [/]" in screen_text(app))
        await press(pilot, "escape")
        assert isinstance(app.screen, Overview)


async def test_the_waterfall_of_what_was_sent_is_a_key_away_at_any_size(daemon: FakeDaemon) -> None:
    async with watching(daemon, (80, 24)) as (app, pilot):
        await press(pilot, "p")
        prompt = app.screen
        assert isinstance(prompt, Prompt)
        assert "waterfall" not in screen_text(app)
        prompt.run = new_run(prompt.draft())
        prompt.run.request_id = "req-beef"
        prompt.run.ended = prompt.run.started + 6.4
        prompt.draw()
        await until(lambda: "^w waterfall" in screen_text(app))
        await press(pilot, "ctrl+w")
        screen = app.screen
        assert isinstance(screen, TraceScreen)
        assert screen.trace_id == "req-beef"


async def test_the_footers_keys_are_clicked(daemon: FakeDaemon) -> None:
    async with watching(daemon) as (app, pilot):
        footer = app.screen.query_one("#footer", Lines)
        at = footer.text.index("t traces")
        await pilot.click("#footer", offset=(at - 1, 0))  # between two keys
        assert isinstance(app.screen, Overview)
        await pilot.click("#footer", offset=(at + 4, 0))
        await until(lambda: isinstance(app.screen, Traces))
        await until(lambda: "esc back" in app.screen.query_one("#footer", Lines).text)
        line = app.screen.query_one("#footer", Lines).text
        await pilot.click("#footer", offset=(line.index("esc back"), 0))
        await until(lambda: isinstance(app.screen, Overview))
        await pilot.click("#footer", offset=(footer.text.index("q leave"), 0))
        await until(lambda: isinstance(app.screen, Choice))


async def test_keys_are_answered_at_once_in_a_large_cluster() -> None:
    with running(states.many(64, 1000)) as fake:
        async with watching(fake, (160, 45)) as (app, _):
            rows = app.screen.query_one("#processes", Rows)
            began = time.process_time()
            for _ in range(20):
                rows.action_move(1)
            assert (time.process_time() - began) / 20 < 0.05
            began = time.process_time()
            app.redraw()
            assert time.process_time() - began < 0.25


async def test_a_read_only_console_opens_everything_and_sends_nothing(daemon: FakeDaemon) -> None:
    async with watching(daemon, read_only=True) as (app, pilot):
        await press(pilot, "t")
        assert isinstance(app.screen, Traces)
        await press(pilot, "escape", "p", "r", "a")
        assert isinstance(app.screen, Overview)
        assert all(r.startswith("GET") for r in daemon.requests)

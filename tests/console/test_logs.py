"""Logs in the console: times read from lines, logs merged, jumps to a time, filters of the whole log."""

import time

import msgspec
import pytest

from eccon.console.draw import waterfall
from eccon.console.draw.text import plain
from eccon.console.logtext import time_of
from eccon.console.screens.logs import ALL, Logs
from eccon.console.widgets.logview import LogView
from eccon.model import LogEvent
from tests.console import states
from tests.console.fake_daemon import FakeDaemon, running
from tests.console.test_screens import press, screen_text, until, watching

NOV_29 = 1795988614.0  # 2026-11-29 21:43:34 UTC


@pytest.mark.parametrize(
    ("line", "at"),
    [
        ("(EngineCore pid=3) 1795988628.104377 DEBUG 3 MainThread vllm_rbln:1 EC", 1795988628.104377),
        ("(APIServer pid=3) INFO 11-29 21:43:48 [uvicorn.access:482] GET", NOV_29 + 14),
        ("2026-11-29 21:43:34,567 INFO listening", NOV_29 + 0.567),
        ("2026-11-29 21:43:34 req-1 200", NOV_29),
        ("\x1b[32mINFO\x1b[0m 11-29 21:43:34 x", NOV_29),
        ("INFO 12-31 23:59:59 a year ago", 1767225599.0),
        ("Traceback (most recent call last):", None),
        ("INFO 13-45 99:99:99 no time", None),
        ("port 18000000000 12:30", None),
    ],
)
def test_the_time_of_a_line(line: str, at: float | None, utc: None) -> None:
    found = time_of(line, NOV_29 + 3600)
    assert found == (at if at is None else pytest.approx(at, abs=1e-6))


def test_logs_merge_by_time_and_what_is_looked_at_stays(utc: None) -> None:
    view = LogView()
    view.add_all([("a", "1795988614.000 one"), ("a", "  goes with one"), ("a", "1795988620.000 four")])
    view.top = view.found = view.marked = 2
    view.add_all([("b", "1795988616.000 three"), ("b", "1795988615.000 two")])
    texts = [line.rpartition(" ")[2] for line in view.lines_kept]
    assert texts == ["one", "one", "two", "three", "four"]
    assert (view.top, view.found, view.marked) == (4, 4, 4)
    assert view.reaches(1795988614.0)
    assert not view.reaches(1795988613.0)


async def test_all_logs_together_with_times(utc: None) -> None:
    with running(states.busy(2)) as fake:
        fake.log = ["INFO 11-29 21:43:34 first", "INFO 11-29 21:43:50 last"]
        async with watching(fake, (120, 36), wait_for="encoder-1") as (app, pilot):
            await press(pilot, "l", "m")
            view = app.screen.query_one(LogView)
            await until(lambda: view.count == 10)
            lines = view.text.splitlines()
            assert [line.split()[-1] for line in lines[:10]] == ["first"] * 5 + ["last"] * 5
            sources = {line.split()[1] for line in lines[:10]}
            assert sources == {"pd", "proxy", "encoder-0", "encoder-1", "daemon"}
            assert lines[0].startswith("21:43:34.000 ")
            await press(pilot, "z")
            assert not view.text.startswith("21:43:34")
            await press(pilot, "m")
            await until(lambda: view.count == 2)


async def test_only_lines_with_a_text_are_asked_for(daemon: FakeDaemon) -> None:
    async with watching(daemon) as (app, pilot):
        await press(pilot, "l", "ampersand", *"boom", "enter")
        await until(lambda: any("grep=boom" in r and "lines=20000" in r for r in daemon.requests))
        await until(lambda: "only boom" in screen_text(app))
        assert sum("grep=" in r for r in daemon.requests) == 1  # not once a letter


async def test_an_event_opens_the_log_at_its_time(daemon: FakeDaemon, utc: None) -> None:
    at = states.NOW - 300
    stamps = [time.strftime("%m-%d %H:%M:%S", time.gmtime(at + 10 * n)) for n in range(-50, 50)]
    daemon.log = [f"INFO {stamp} line {n}" for n, stamp in enumerate(stamps)]
    async with watching(daemon) as (app, pilot):
        await press(pilot, "e")
        await until(lambda: "ejected" in screen_text(app))
        await press(pilot, "down", "down", "l")
        screen = app.screen
        assert isinstance(screen, Logs)
        assert screen.process_name == "encoder-3"
        await until(lambda: screen.view.marked is not None)
        assert "line 50" in screen.view.lines_kept[screen.view.marked or 0]
        assert "paused" in screen_text(app)


async def test_a_request_opens_its_lines_in_all_logs(daemon: FakeDaemon) -> None:
    daemon.log = ["INFO nothing", "DEBUG pushed mm_hash=a2", "INFO req-beef 200"]
    async with watching(daemon) as (app, pilot):
        await press(pilot, "t", "down", "down", "enter", "l")  # the row "queue" is chosen
        screen = app.screen
        assert isinstance(screen, Logs)
        assert screen.process_name == ALL
        assert screen.words == "/req\\-beef|a0|a1|a2/"
        await until(lambda: "/18" in screen_text(app))  # two lines of nine logs


def test_what_befell_the_encoders_is_in_the_waterfall() -> None:
    trace = next(t for t in states.busy().traces if t.id == "req-beef")
    events = (
        LogEvent(at=trace.started_at + 1.0, subject="encoder-3", text="ejected: hangs", severity="warning"),
        LogEvent(at=trace.started_at + 1.0, subject="encoder-1", text="another's", severity="warning"),
        LogEvent(at=trace.started_at - 9.0, subject="encoder-3", text="before", severity="warning"),
        LogEvent(at=trace.started_at + 1.0, subject="encoder-3", text="no matter"),
    )
    lines = [plain(line) for _, line in waterfall.span_lines(trace, 160, states.NOW, events)]
    shown = [line for line in lines if line.startswith("event")]
    assert len(shown) == 1
    assert "encoder-3" in shown[0]
    assert "ejected: hangs" in shown[0]
    assert shown[0].count("▲") == 2
    short = msgspec.structs.replace(trace, spans=())
    assert waterfall.span_lines(short, 160, states.NOW, events)

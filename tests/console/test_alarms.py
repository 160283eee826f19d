"""Alarms in the console: the way to what they are about, their countdown, and how they reach the desktop."""

import msgspec
import pytest

from eccon.console import keymap
from eccon.console.draw import events
from eccon.console.draw.text import line_width, plain
from eccon.console.notify import sequence
from eccon.console.widgets.rows import Rows
from eccon.model import Alarm, ClusterChanged
from tests.console import states
from tests.console.fake_daemon import FakeDaemon
from tests.console.terminal import open_console
from tests.console.test_screens import press, until, watching

STALL = Alarm(
    key="stalled:pd",
    subject="pd",
    text="no answer",
    since=states.NOW - 6,
    help="restart",
    due=states.NOW + 24,
)


def test_an_alarm_tells_when_it_will_be_too_late_and_which_keys_help() -> None:
    keys = {"restart": "r", "attend": "!"}
    text = plain(events.alarm(STALL, 100, states.NOW, keys, chosen="encoder-0"))
    assert "in 24 s it exits" in text
    assert text.split()[-3:] == ["!", "r", "restart"]
    there = plain(events.alarm(STALL, 100, states.NOW + 60, keys, chosen="pd"))
    assert "in 0 s it exits" in there
    assert "!" not in there
    for width in (1, 20, 40, 80):
        assert line_width(events.alarm(STALL, width, states.NOW, keys, chosen="")) == width


async def test_attend_goes_from_alarm_to_alarm(daemon: FakeDaemon) -> None:
    async with watching(daemon) as (app, pilot):
        rows = app.screen.query_one("#processes", Rows)
        await press(pilot, "exclamation_mark")
        assert rows.chosen == "encoder-3"
        await press(pilot, "exclamation_mark")
        assert rows.chosen == "encoder-5"
        await press(pilot, "exclamation_mark")
        assert rows.chosen == "encoder-3"
        daemon.change(ClusterChanged(seq=500, cluster=app.state.cluster, alarms=()))
        await until(lambda: not app.state.alarms)
        await press(pilot, "exclamation_mark")
        assert "no alarm" in "".join(t for t, _ in app.message)


def test_a_notification_cannot_be_broken_out_of() -> None:
    assert sequence("off", "a", "b", tmux=True) == ""
    assert sequence("osc9", "eccon x", "it broke", tmux=False) == "\x1b]9;eccon x: it broke\x07"
    evil = sequence("osc777", "a;b", "x\x07\x1b]52;c;aGk=\x07\x9c", tmux=False)
    assert evil.count("\x1b") == 1
    assert evil.count("\x07") == 1
    assert evil.startswith("\x1b]777;notify;a,b;x")
    inside = sequence("osc9", "t", "x", tmux=True)
    assert inside == "\x1bPtmux;\x1b\x1b]9;t: x\x07\x1b\\"


@pytest.mark.parametrize(("setting", "heard"), [("osc9", True), ("off", False)])
def test_a_new_alarm_reaches_the_desktop_when_wanted(daemon: FakeDaemon, setting: str, heard: bool) -> None:
    config = daemon.socket.parent / "config" / "eccon"
    config.mkdir(parents=True)
    (config / "console.toml").write_text(f'notify = "{setting}"\n')
    daemon.state = msgspec.structs.replace(states.degraded(), alarms=())
    with open_console(daemon.socket, env={"TMUX": ""}) as t:
        t.until("encoder-3")
        daemon.change(ClusterChanged(seq=50, cluster=daemon.state.cluster, alarms=(STALL,)))
        t.until("no answer")
        assert (b"\x1b]9;eccon lab: pd: no answer\x07" in t.output) is heard


def test_settings_of_the_notification() -> None:
    assert keymap.Settings().notify == "off"

"""Recordings: written, read again, damaged; and a console that shows one."""

import stat
import time
from pathlib import Path

import msgspec
import pytest

from eccon.console.app import ConsoleApp
from eccon.console.replay import Replay
from eccon.console.source import Problem
from eccon.model import ClusterState, EventLogged, LogEvent, ProcessChanged, State
from eccon.recording import Record, Recorder, RecordingError, read
from tests.console import states
from tests.console.test_screens import press, screen_text, until

STALLED = "encoder-0 hangs"


def recording(path: Path, steps: int = 5, every_s: float = 10.0) -> ClusterState:
    """A busy cluster whose encoder-0 stalls at the last step."""
    state = states.busy(2)
    with Recorder(path) as recorder:
        recorder.take(state, states.NOW)
        for n in range(steps):
            event = LogEvent(at=states.NOW, subject="pd", text=f"step {n}")
            recorder.take(EventLogged(state.seq + 1 + n, event), states.NOW + every_s * n)
        process = state.process("encoder-0")
        assert process is not None
        stalled = msgspec.structs.replace(process, state=State.STALLED, reason=STALLED)
        recorder.take(ProcessChanged(state.seq + 1 + steps, stalled), states.NOW + every_s * steps)
    return state


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "r"
    state = recording(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    records = list(read(path))
    assert len(records) == 7
    assert records[0] == Record(states.NOW, state=state)
    assert records[-1].at == states.NOW + 50
    with pytest.raises(FileExistsError):
        Recorder(path)


def test_a_cut_end_is_left_out_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recording(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert len(list(read(path))) == 6
    path.write_bytes(whole.replace(b"step 2", b"step \xff"))
    with pytest.raises(RecordingError, match=r"r:5: "):
        list(read(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no recording"),
        (b"\x7fELF\x00\n", "no recording"),
        (b'{"eccon_recording":99,"at":0}\n', "newer"),
        (None, "No such file"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "r"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordingError, match=said):
        list(read(path))


async def test_a_console_shows_a_recording_at_its_own_time(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recording(path)
    replay = Replay(path, speed=1 / 16)
    app = ConsoleApp(path, read_only=True, source=lambda: replay)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: "replay ×0.0625  read-only" in screen_text(app))
        assert states.NOW <= app.now() < states.NOW + 10
        await until(lambda: "2h02m" in screen_text(app))  # since then, not since long ago
        await press(pilot, "full_stop")
        await until(lambda: replay.held)
        held = app.now()
        await press(pilot, "e")
        assert app.now() == held
        await press(pilot, "full_stop", *["plus"] * 16)
        assert replay.speed == 4096
        await until(lambda: STALLED in str(app.state.process("encoder-0")))
        await until(lambda: replay.ended)
        await press(pilot, "escape", "r")
        assert "read-only" in "".join(t for t, _ in app.message)
        await until(lambda: "replay ended" in screen_text(app))
        with pytest.raises(Problem):
            await replay.do("restart", "pd")
        with pytest.raises(Problem):
            replay.prompt(b"{}", "x")


async def test_an_hour_is_played_in_no_time(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recording(path, steps=3600, every_s=1.0)
    replay = Replay(path, speed=4096)
    app = ConsoleApp(path, read_only=True, source=lambda: replay)
    async with app.run_test(size=(80, 24)):
        began = time.monotonic()
        await until(lambda: replay.ended, 30)
        assert time.monotonic() - began < 20
        assert len(app.state.events) == 1000
        assert app.state.events[-1].text == "step 3599"


async def test_a_damaged_recording_says_so_in_the_console(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recording(path)
    path.write_bytes(path.read_bytes().replace(b"step 0", b"step \xff"))
    app = ConsoleApp(path, read_only=True, source=lambda: Replay(path, 4096))
    async with app.run_test(size=(120, 40)):
        await until(lambda: app.lost.startswith(f"{path}:3: "))

"""Alarms that come before it hurts."""

import msgspec

from eccon.model import Exit, Process, Role, State
from eccon.supervisor.worries import DISK_LOW, Deaths, of_disk, of_process, of_queue

NOW = 1_774_000_000.0


def process(state: State = State.BACKOFF, died: float | None = None, asked: bool = False) -> Process:
    ended = None if died is None else Exit(at=died, signal=9, asked=asked)
    return Process(name="encoder-0", role=Role.ENCODER, state=state, exit=ended)


def test_three_deaths_in_a_short_time_are_a_loop() -> None:
    deaths = Deaths()
    counts = [deaths.note(process(died=NOW + t), NOW + t) for t in (0, 0, 10, 20, 20)]
    assert counts == [1, 1, 2, 3, 3]
    assert of_process(process(died=NOW + 10), 2, NOW) is None
    alarm = of_process(process(died=NOW + 20), 3, NOW)
    assert alarm is not None
    assert (alarm.subject, alarm.severity, alarm.help) == ("encoder-0", "critical", "logs")
    assert "3 times" in alarm.text
    assert "signal 9" in alarm.text
    assert deaths.note(process(died=NOW + 20), NOW + 400) == 0


def test_stops_that_were_asked_for_are_no_deaths() -> None:
    deaths = Deaths()
    assert [deaths.note(process(died=NOW + t, asked=True), NOW) for t in range(5)] == [0] * 5


def test_a_process_that_was_given_up() -> None:
    alarm = of_process(process(State.FAILED, died=NOW), 1, NOW)
    assert alarm is not None
    assert alarm.help == "start"
    assert of_process(msgspec.structs.replace(process(), state=State.READY), 0, NOW) is None


def test_a_process_that_does_not_answer_any_more() -> None:
    silent = msgspec.structs.replace(
        process(State.STALLED), since=NOW - 9, reason="/health did not answer within 2 s"
    )
    alarm = of_process(silent, 0, NOW)
    assert alarm is not None
    assert (alarm.severity, alarm.help, alarm.since) == ("critical", "restart", NOW - 9)
    assert "/health did not answer within 2 s" in alarm.text
    assert of_process(silent, 0, NOW, told=True) is None


def test_a_queue_that_fills_and_a_disk() -> None:
    assert of_queue(0, 1024, NOW) is None
    assert of_queue(511, 1024, NOW) is None
    assert of_queue(600, 0, NOW) is None
    filling = of_queue(512, 1024, NOW)
    assert filling is not None
    assert "512" in filling.text
    assert of_queue(1, 1, NOW) is not None
    assert of_disk(DISK_LOW, "/x", NOW) is None
    low, out = of_disk(100 * 2**20, "/x", NOW), of_disk(2**20, "/x", NOW)
    assert low is not None
    assert out is not None
    assert (low.severity, out.severity) == ("warning", "critical")
    assert "100 MiB" in low.text

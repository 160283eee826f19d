"""Sockets of the guard: notes from worker to scheduler, events to the outside."""

import json
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from eccon.connector.eccon_guard.channel import BACKLOG, Listener, Speaker, meeting_place, socket_path
from eccon.connector.eccon_guard.events import Events
from eccon.connector.eccon_guard.notes import Note


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    made = Path("/tmp") / f"eccon-guard-test-{uuid.uuid4().hex[:8]}"
    yield socket_path(str(made), "engine")
    for left in made.iterdir():
        left.unlink()
    made.rmdir()


def test_a_scheduler_that_comes_late_is_told_what_holds(path: Path) -> None:
    speaker = Speaker(path)
    speaker.state = lambda: [Note("staged", "a")]
    listener = Listener(path)
    speaker.say(Note("staged", "lost: nobody listens, but it is part of the state"))
    assert listener.drain() == []
    speaker.tick()
    speaker.say(Note("staged", "b"))
    assert listener.drain() == [Note("restart"), Note("staged", "a"), Note("staged", "b")]
    assert listener.drain() == []
    assert not path.exists()
    speaker.close()
    assert listener.drain() == []
    listener.close()


def test_no_worker_yet_is_no_error(path: Path) -> None:
    listener = Listener(path)
    assert listener.drain() == []


def test_what_finds_no_room_comes_later_in_order(path: Path) -> None:
    speaker, listener = Speaker(path), Listener(path)
    assert listener.drain() == []
    sent = [Note("staged", f"{n:0200d}") for n in range(5000)]
    speaker.tick()
    for note in sent:
        speaker.say(note)
    got: list[Note] = []
    while len(got) < len(sent) + 1:
        got += listener.drain()
        speaker.tick()
    assert got == [Note("restart"), *sent]
    speaker.close()
    listener.close()


def test_a_scheduler_that_does_not_listen_costs_bounded_memory(path: Path) -> None:
    speaker, listener = Speaker(path), Listener(path)
    speaker.state = lambda: [Note("staged", "now")]
    listener.drain()
    speaker.tick()
    for n in range(BACKLOG + 5000):
        speaker.say(Note("staged", f"{n:0200d}"))
    got: list[Note] = []
    while not got or got[-1] != Note("staged", "last"):
        speaker.tick()
        if not (now := listener.drain()):
            speaker.say(Note("staged", "last"))
        got += now
    assert got.count(Note("restart")) >= 2
    assert got.count(Note("staged", "now")) == got.count(Note("restart"))
    speaker.close()
    listener.close()


def test_several_threads_may_speak(path: Path) -> None:
    speaker, listener = Speaker(path), Listener(path)
    listener.drain()
    speaker.tick()

    def talk(name: int) -> None:
        for n in range(100):
            speaker.say(Note("staged", f"{name}-{n}"))

    threads = [threading.Thread(target=talk, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    got: list[Note] = []
    while len(got) < 401:
        got += listener.drain()
        speaker.tick()
    for t in range(4):
        mine = [note.mm_hash for note in got if note.mm_hash.startswith(f"{t}-")]
        assert mine == [f"{t}-{n}" for n in range(100)]
    for thread in threads:
        thread.join()
    speaker.close()
    listener.close()


def test_what_a_killed_process_left_is_removed_and_nothing_else(path: Path) -> None:
    left, new = path.with_name("left.sock"), path.with_name("new.sock")
    speaker = Speaker(path)
    for place in (left, new):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            s.bind(str(place))
    for old in (left, path):
        os.utime(old, (1, 1))
    socket_path(str(path.parent), "another")
    assert not left.exists()
    assert new.exists()
    assert path.exists()  # old, but somebody listens
    speaker.close()


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError):
        socket_path(str(tmp_path), "engine")
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(real)
    with pytest.raises(PermissionError):
        socket_path(str(link), "engine")
    deep = real / ("d" * 100)
    with pytest.raises(OSError, match="too long"):
        socket_path(str(deep), "engine")
    found = meeting_place([str(tmp_path), "/proc/nobody", str(deep), str(real)], "engine")
    assert found.parent == real
    with pytest.raises(PermissionError):
        meeting_place([str(deep), str(tmp_path)], "engine")
    assert socket_path(str(real), "../e " * 99).parent == real


def test_events_are_numbered_and_never_block(tmp_path: Path) -> None:
    where = f"/tmp/eccon-guard-events-{uuid.uuid4().hex[:8]}"
    events = Events(where, "encoder-0")
    events.tell("save", "h0")  # nobody there: lost, and counted
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(where)
        try:
            events.tell("push", "h1", peer="tcp://x", nbytes=5, text="y" * 1000)
            first = json.loads(receiver.recv(65536))
            for n in range(5000):
                events.tell("push", str(n))
            receiver.setblocking(False)
            numbers = []
            while True:
                try:
                    numbers.append(json.loads(receiver.recv(65536))["n"])
                except BlockingIOError:
                    break
        finally:
            Path(where).unlink()
    assert {k: first[k] for k in ("v", "who", "n", "k", "h", "p", "b")} == {
        "v": 1, "who": "encoder-0", "n": 2, "k": "push", "h": "h1", "p": "tcp://x", "b": 5,
    }  # fmt: skip
    assert len(first["x"]) == 300
    assert numbers == list(range(3, 3 + len(numbers)))
    assert len(numbers) < 5000
    events.close()


def test_without_a_path_nothing_is_sent() -> None:
    events = Events("", "pd")
    events.tell("push", "h")
    events.close()

"""The PD's thread: real messages over ZMQ, a NIXL of memory copies, encoders that misbehave."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from eccon.connector.eccon_guard.events import Events
from eccon.connector.eccon_guard.notes import Note
from eccon.connector.eccon_guard.puller import Puller
from eccon.connector.eccon_guard.settings import Settings
from eccon.connector.eccon_guard.store import Store
from eccon.connector.eccon_guard.wire import Message, Tensor, crc32_at, encode

PATIENCE_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Buffer:
    """As much of a tensor as is asked of one."""

    def __init__(self, numel: int) -> None:
        self._memory = (ctypes.c_char * (numel * 2))()
        self._numel = numel

    def reshape(self, _shape: list[int]) -> "Buffer":
        return self

    def numel(self) -> int:
        return self._numel

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return ctypes.addressof(self._memory)

    def bytes(self) -> bytes:
        return bytes(self._memory)


class Nixl:
    """NIXL between parts of this process: raises as it does, and keeps account of what is registered."""

    def __init__(self) -> None:
        self.registered: list[Any] = []
        self.agents: list[bytes] = []
        self.dead: set[bytes] = set()
        self.stopped: set[bytes] = set()
        self.calls_by: set[str] = set()
        self.most_at_once = 0
        self._reads: dict[int, tuple[int, int, int, bytes]] = {}
        self._serial = 0

    def _called(self) -> None:
        self.calls_by.add(threading.current_thread().name)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._called()
        if metadata in self.dead or not metadata.startswith(b"agent"):
            raise RuntimeError("NIXL_ERR_BACKEND")
        assert metadata not in self.agents
        self.agents.append(metadata)
        return metadata

    def remove_remote_agent(self, name: bytes) -> None:
        self.agents.remove(name)

    def get_reg_descs(self, where: list[Any], _kind: str) -> Any:
        return where

    def register_memory(self, where: Any, backends: list[str]) -> None:
        assert backends == ["UCX"]
        self.registered.append(where)

    def deregister_memory(self, where: Any) -> None:
        self.registered.remove(where)

    def prep_xfer_dlist(self, agent: Any, where: list[Any], _kind: str) -> Any:
        if agent != "NIXL_INIT_AGENT" and where[0][0] < 4096:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        return agent, where[0]

    def make_prepped_xfer(self, way: str, local: Any, _i: Any, remote: Any, _j: Any, notif_msg: bytes) -> int:
        assert (way, notif_msg) == ("READ", b"")
        self._serial += 1
        agent, (there, nbytes, _) = remote
        self._reads[self._serial] = (local[1][0], there, nbytes, agent)
        self.most_at_once = max(self.most_at_once, len(self._reads))
        return self._serial

    def transfer(self, _read: int) -> str:
        return "PROC"

    def check_xfer_state(self, read: int) -> str:
        self._called()
        here, there, nbytes, agent = self._reads[read]
        if agent in self.dead:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        if agent in self.stopped:
            return "PROC"
        ctypes.memmove(here, there, nbytes)
        return "DONE"

    def release_xfer_handle(self, read: int) -> None:
        assert self._reads[read][3] not in self.stopped, "let go of while it is written into"
        del self._reads[read]


class Encoder:
    """Holds items and announces them."""

    def __init__(self, name: str, push: "zmq.Socket[bytes]") -> None:
        self.agent = f"agent {name}".encode()
        self._name = name
        self._push = push
        self.items: dict[str, Buffer] = {}

    def announce(self, mm_hash: str, content: bytes = b"x" * 64, **changes: Any) -> None:
        buffer = self.items[mm_hash] = Buffer(len(content) // 2)
        ctypes.memmove(buffer.data_ptr(), content, len(content))
        self.again(mm_hash, **changes)

    def again(self, mm_hash: str, **changes: Any) -> None:
        buffer = self.items[mm_hash]
        nbytes = buffer.numel() * 2
        info = Tensor(buffer.data_ptr(), nbytes, 0, [1, buffer.numel()], "torch.float16")
        crc = crc32_at(buffer.data_ptr(), nbytes)
        made = Message(self._name, mm_hash, self.agent, info, "127.0.0.1", 1, crc)
        self._push.send(encode(msgspec.structs.replace(made, **changes)))


class PD:
    """A puller on its thread, and what it said."""

    def __init__(self, context: "zmq.Context[Any]") -> None:
        self.nixl = Nixl()
        self.notes: list[tuple[str, str]] = []
        self.acks: list[tuple[str, str]] = []
        self.settings = Settings(pull_timeout_s=0.3, staging_bytes=4096)
        self.store = Store(4096, 60.0, lambda h, why: self.notes.append(("gone", f"{h} {why}")))
        self.stop = threading.Event()
        self.incoming = context.socket(zmq.PULL)
        self.port = self.incoming.bind_to_random_port("tcp://127.0.0.1", 20000, 31000)
        self.puller = Puller(
            self.nixl, ["UCX"], self.settings, self.store, Buffer, self._ack, self._say, Events("", "pd"),
            lambda: None, 16,
        )  # fmt: skip
        self.thread = threading.Thread(
            target=self.puller.run, args=(self.incoming, self.stop), name="the puller"
        )
        self.thread.start()

    def _ack(self, message: Message, status: str) -> None:
        self.acks.append((message.mm_hash, status))

    def _say(self, note: Note) -> None:
        if note.kind != "pending":
            self.notes.append((note.kind, note.mm_hash))

    def holds(self, mm_hash: str) -> bytes | None:
        """An item's bytes."""
        kept: Buffer | None = self.store.get(mm_hash)
        return None if kept is None else kept.bytes()

    def acked(self, mm_hash: str, status: str = "ok") -> None:
        until(lambda: (mm_hash, status) in self.acks)

    def close(self) -> None:
        self.stop.set()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self.incoming.close(linger=0)


@pytest.fixture
def pd() -> Iterator[PD]:
    context: zmq.Context[Any] = zmq.Context()
    made = PD(context)
    yield made
    made.close()
    context.destroy(linger=0)


@pytest.fixture
def join(pd: PD) -> Iterator[Callable[[str], Encoder]]:
    context: zmq.Context[Any] = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def start(name: str) -> Encoder:
        push: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        push.connect(f"tcp://127.0.0.1:{pd.port}")
        sockets.append(push)
        return Encoder(name, push)

    yield start
    for push in sockets:
        push.close(linger=0)
    context.term()


Join = Callable[[str], Encoder]


def test_items_are_pulled_as_they_are_announced(pd: PD, join: Join) -> None:
    first, second = join("one"), join("two")
    for n in range(5):
        first.announce(f"a{n}", bytes([n]) * 64)
        second.announce(f"b{n}", bytes([n + 100]) * 64)
    for n in range(5):
        pd.acked(f"a{n}")
        pd.acked(f"b{n}")
        assert pd.holds(f"a{n}") == bytes([n]) * 64
        assert pd.holds(f"b{n}") == bytes([n + 100]) * 64
    assert {kind for kind, _ in pd.notes} == {"staged"}
    assert pd.nixl.registered == []
    assert pd.nixl.most_at_once <= 2  # one of each encoder
    assert pd.nixl.calls_by == {"the puller"}


def test_an_encoder_that_died_costs_its_item_alone(pd: PD, join: Join) -> None:
    dead, alive = join("dead"), join("alive")
    dead.announce("early")
    pd.acked("early")
    pd.nixl.dead.add(dead.agent)
    dead.announce("late")
    pd.acked("late", "fail")
    assert ("bad", "late") in pd.notes
    assert pd.store.get("early") is not None  # pulled before: survives its encoder
    alive.announce("other")
    pd.acked("other")
    assert pd.nixl.registered == []


def test_an_encoder_that_died_may_come_back_under_its_name(pd: PD, join: Join) -> None:
    encoder = join("one")
    encoder.announce("a")
    pd.acked("a")
    pd.nixl.dead.add(encoder.agent)
    encoder.announce("b")
    pd.acked("b", "fail")
    assert pd.nixl.agents == []
    pd.nixl.dead.clear()
    encoder.announce("c")
    pd.acked("c")


def test_a_stopped_encoder_holds_up_nobody_else_and_goes_on_later(pd: PD, join: Join) -> None:
    stopped, other = join("stopped"), join("other")
    pd.nixl.stopped.add(stopped.agent)
    stopped.announce("a")
    stopped.announce("b")
    until(lambda: ("bad", "a") in pd.notes)
    until(lambda: ("bad", "b") in pd.notes)
    assert len(pd.nixl.registered) == 1  # a's buffer stays: it may be written into yet
    other.announce("c")
    pd.acked("c")
    pd.nixl.stopped.clear()
    pd.acked("a")  # late, and as good
    assert ("staged", "a") in pd.notes
    stopped.announce("d")
    pd.acked("d")
    assert pd.nixl.registered == []


def test_other_bytes_than_announced_are_no_item(pd: PD, join: Join) -> None:
    encoder = join("one")
    encoder.announce("a", ec_guard_crc32=12345)
    pd.acked("a", "fail")
    assert ("bad", "a") in pd.notes
    assert pd.store.get("a") is None
    encoder.announce("b", ec_guard_crc32=None)  # the vendor's encoder sends none
    pd.acked("b")


def test_what_is_here_already_is_not_pulled_again(pd: PD, join: Join) -> None:
    encoder = join("one")
    encoder.announce("a")
    pd.acked("a")
    pd.nixl.stopped.add(encoder.agent)  # a pull would hang
    pd.acks.clear()
    encoder.again("a")
    pd.acked("a")
    pd.nixl.stopped.clear()
    encoder.announce("a", b"other" * 20)
    until(lambda: pd.holds("a") == b"other" * 20)


def test_a_failed_pull_does_not_take_away_what_was_pulled(pd: PD, join: Join) -> None:
    encoder = join("one")
    encoder.announce("a")
    pd.acked("a")
    encoder.again("a", ec_guard_crc32=1)
    pd.acked("a", "fail")
    assert ("bad", "a") not in pd.notes
    assert pd.store.get("a") is not None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"junk",
        b"\xc1" * 50,
        msgspec.msgpack.encode([1, 2, 3]),
        msgspec.msgpack.encode({"engine_id": "e", "mm_hash": "h"}),
        encode(Message("e", "h", b"junk agent", Tensor(4096, 64, 0, [1, 32], "torch.float16"))),
        encode(Message("e", "h", b"agent", Tensor(1, 64, 0, [1, 32], "torch.float16"))),
        encode(Message("e", "h", b"agent", Tensor(4096, 64, 0, [10**9, 10**9], "torch.float16"))),
        encode(Message("e", "h", b"agent", Tensor(4096, 10**12, 0, [1, 5 * 10**11], "torch.float16"))),
        encode(Message("", "", b"", Tensor(0, 0, 0, [], ""))),
    ],
)
def test_junk_is_logged_and_nothing_else(pd: PD, join: Join, raw: bytes) -> None:
    encoder = join("one")
    encoder._push.send(raw)
    encoder.announce("a")
    pd.acked("a")
    assert pd.nixl.registered == []


def test_items_that_nobody_wants_are_let_go(pd: PD, join: Join) -> None:
    encoder = join("one")
    for n in range(10):
        encoder.announce(f"h{n}", bytes(1000))
        pd.acked(f"h{n}")
    assert pd.store.hashes() == ["h6", "h7", "h8", "h9"]
    assert pd.notes.count(("gone", "h0 room")) == 1

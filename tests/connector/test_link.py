"""The encoder's thread against a PD that is there, is not, comes and goes."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from eccon.connector.eccon_guard.link import Link
from eccon.connector.eccon_guard.wire import Message, Tensor, crc32_at, decode
from tests.contract.target import free_port

PATIENCE_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Encoder:
    """A link on its thread, and what it said."""

    def __init__(self) -> None:
        self.port = free_port()
        self.states: list[bool] = []
        self.sent: list[tuple[str, bool]] = []
        self._memory = (ctypes.c_char * 64)()
        self._context: zmq.Context[Any] = zmq.Context()
        self._stop = threading.Event()
        self.link = Link(
            self._context,
            f"tcp://127.0.0.1:{self.port}",
            crc=True,
            on_state=self.states.append,
            on_sent=lambda message, sent: self.sent.append((message.mm_hash, sent)),
            tick=lambda: None,
        )
        self._thread = threading.Thread(target=self.link.run, args=(self._stop,))
        self._thread.start()

    def publish(self, mm_hash: str) -> int:
        """Returns the checksum."""
        address = ctypes.addressof(self._memory)
        info = Tensor(address, 64, 0, [1, 32], "torch.float16")
        self.link.publish(Message("engine", mm_hash, b"agent", info), self._memory)
        return crc32_at(address, 64)

    def close(self) -> None:
        self._stop.set()
        self.link.wake()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._context.destroy(linger=0)


@pytest.fixture
def encoder() -> Iterator[Encoder]:
    made = Encoder()
    yield made
    made.close()


def pd(context: "zmq.Context[Any]", port: int) -> "zmq.Socket[bytes]":
    incoming: zmq.Socket[bytes] = context.socket(zmq.PULL)
    incoming.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    incoming.setsockopt(zmq.LINGER, 0)
    incoming.bind(f"tcp://127.0.0.1:{port}")
    return incoming


def test_without_a_pd_nothing_waits_and_nothing_is_kept(encoder: Encoder) -> None:
    began = time.monotonic()
    for n in range(2):
        encoder.publish(f"h{n}")
    assert time.monotonic() - began < 1.0
    until(lambda: encoder.sent == [("h0", False), ("h1", False)])
    assert encoder.states == []
    with zmq.Context() as context:
        incoming = pd(context, encoder.port)
        until(lambda: encoder.states == [True])
        crc = encoder.publish("h2")
        got = decode(incoming.recv())
        assert (got.mm_hash, got.ec_guard_crc32) == ("h2", crc)  # what was not sent then does not come now
        incoming.close()


def test_a_pd_that_goes_and_comes_is_noticed(encoder: Encoder) -> None:
    with zmq.Context() as context:
        incoming = pd(context, encoder.port)
        until(lambda: encoder.link.up)
        incoming.close()
        until(lambda: not encoder.link.up)
    with zmq.Context() as context:
        incoming = pd(context, encoder.port)
        until(lambda: encoder.link.up)
        encoder.publish("h")
        assert decode(incoming.recv()).mm_hash == "h"
        incoming.close()
    assert encoder.states[:3] == [True, False, True]

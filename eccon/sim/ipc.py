"""What API server and engine say to each other, over a socket pair: msgpack behind a length of four bytes."""

import socket
import struct
import threading
from typing import TypeAlias

import msgspec

from eccon.sim.vision import Picture

__all__ = [
    "Abort",
    "Add",
    "Dead",
    "FromEngine",
    "Item",
    "Link",
    "Output",
    "Ready",
    "Refused",
    "Stats",
    "Step",
    "ToEngine",
    "frame",
]

LENGTH = struct.Struct("!I")


class Item(msgspec.Struct, frozen=True):
    """One media item. `picture` and `tokens` are known only where images are decoded: not on a PD."""

    mm_hash: str
    picture: Picture | None = None
    tokens: int = 0


class Add(msgspec.Struct, frozen=True, tag="add"):
    """A request, validated."""

    id: str
    items: list[Item]
    text_tokens: int
    max_tokens: int
    min_tokens: int
    n: int
    text: str
    """The last words of the user, of which a text answer is made."""
    wait_s: float | None = None
    """How long a guarded engine lets it wait for its items; None: as long as any."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client is gone."""

    id: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Loaded; requests may come."""


class Output(msgspec.Struct, frozen=True):
    """Something of one choice of a request."""

    id: str
    index: int
    text: str
    tokens: int
    finish_reason: str | None
    prompt_tokens: int
    told: dict[str, str] | None = None
    """A guarded encoder's word on its pushes, by hash."""


class Stats(msgspec.Struct, frozen=True):
    """As after a step. Nothing changes while a step takes its time, so metrics freeze in a stall."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


class Step(msgspec.Struct, frozen=True, tag="step"):
    """The outcome of one step of the engine."""

    outputs: list[Output]
    stats: Stats


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """One request failed, the engine lives."""

    id: str
    silent: bool = False
    """A stream of it ends without an error event: vLLM passes over an end without tokens."""


class Dead(msgspec.Struct, frozen=True, tag="dead"):
    """The engine is about to exit."""


ToEngine: TypeAlias = Add | Abort
FromEngine: TypeAlias = Ready | Step | Refused | Dead


def frame(message: ToEngine | FromEngine) -> bytes:
    """One message, ready to be sent."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


class Link:
    """The engine's end. Sending to an API server that is gone is no error: an orphan goes on."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()
        self.orphaned = False

    def send(self, message: FromEngine) -> None:
        """Hand over one message."""
        try:
            with self._lock:
                self._socket.sendall(frame(message))
        except OSError:
            self.orphaned = True

    def receive(self) -> ToEngine | None:
        """The next message; None once the API server is gone."""
        head = self._exactly(LENGTH.size)
        body = self._exactly(LENGTH.unpack(head)[0]) if head else b""
        if not body:
            self.orphaned = True
            return None
        return msgspec.msgpack.decode(body, type=ToEngine)

    def _exactly(self, wanted: int) -> bytes:
        got = b""
        while len(got) < wanted:
            try:
                piece = self._socket.recv(wanted - len(got))
            except OSError:
                piece = b""
            if not piece:
                return b""
            got += piece
        return got

"""The stand-in's connector with the guard around it: eccon_guard's own parts over the stand-in's memory.

As vLLM's process would, this one loads the guard's gate, puller, store and link; only what they call NIXL is
ours. Scheduler and worker are one process here, so no channel lies between them.
"""

import ctypes
import itertools
import logging
import queue
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from eccon.connector.eccon_guard.events import Events
from eccon.connector.eccon_guard.gate import Gate
from eccon.connector.eccon_guard.link import Link
from eccon.connector.eccon_guard.notes import Board, Note
from eccon.connector.eccon_guard.puller import Puller
from eccon.connector.eccon_guard.settings import Settings
from eccon.connector.eccon_guard.store import Store
from eccon.connector.eccon_guard.wire import Message
from eccon.connector.eccon_guard.wire import Tensor as Place
from eccon.sim.consumer import Consumer
from eccon.sim.faults import Faults
from eccon.sim.nixl import Pull, RemoteAgents
from eccon.sim.producer import Producer
from eccon.sim.tunables import Tunables
from eccon.sim.vision import Tensor
from eccon.sim.wire import Ack

__all__ = ["GuardedConsumer", "GuardedProducer"]

LEVEL = "gate"
FIRST_WAIT_S = 3.0

log = logging.getLogger("vllm_rbln.distributed.ec_transfer.guard")


class _Buffer:
    """As much of a host tensor as the puller asks for."""

    def __init__(self, numel: int) -> None:
        self._memory = (ctypes.c_char * (numel * 2))()
        self._numel = numel
        self._shape: tuple[int, ...] = (numel,)

    def reshape(self, shape: Sequence[int]) -> "_Buffer":
        self._shape = tuple(shape)
        return self

    def numel(self) -> int:
        return self._numel

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return ctypes.addressof(self._memory)

    def tensor(self) -> Tensor:
        return Tensor(self._shape, bytes(self._memory))


class _Agent:
    """NIXL's agent, as the puller calls it."""

    def __init__(self) -> None:
        self._remote = RemoteAgents()
        self._serial = itertools.count()
        self._into: dict[int, tuple[Pull, int]] = {}

    def add_remote_agent(self, metadata: bytes) -> str:
        name = str(next(self._serial))
        self._remote.add(name, metadata)
        return name

    def remove_remote_agent(self, name: str) -> None:
        self._remote.remove(name)

    def get_reg_descs(self, where: list[Any], _kind: str) -> list[Any]:
        return where

    def register_memory(self, where: list[Any], backends: list[str]) -> None:
        """Nothing is pinned here."""

    def deregister_memory(self, where: list[Any]) -> None:
        """Nothing is pinned here."""

    def prep_xfer_dlist(self, agent: str, where: list[Any], _kind: str) -> tuple[str, Any]:
        return agent, where[0]

    def make_prepped_xfer(
        self, _way: str, local: Any, _i: list[int], remote: Any, _j: list[int], notif_msg: bytes
    ) -> int:
        del notif_msg
        name, (address, nbytes, _) = remote
        handle = next(self._serial)
        self._into[handle] = (self._remote.read(name, address, nbytes), local[1][0])
        return handle

    def transfer(self, _handle: int) -> str:
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        pull, address = self._into[handle]
        state = pull.state()
        if state == "DONE":
            data = pull.data()
            ctypes.memmove(address, data, len(data))
        return state

    def release_xfer_handle(self, handle: int) -> None:
        self._into.pop(handle)[0].release()


class _Gated:
    """What both sides share: who waits, and who has waited in vain."""

    def __init__(self, extra: dict[str, Any], role: str) -> None:
        self.settings, faults = Settings.read(extra)
        for line in faults:
            log.warning("EC guard: %s", line)
        self.board = Board()
        self.gate = Gate()
        self.events = Events(self.settings.events, self.settings.name, LEVEL)
        self.events.tell("level")
        log.info("EC guard: level=%s role=%s: the stand-in asks before it schedules", LEVEL, role)

    def check(self, request_id: str, missing: list[str], lost: str, wait_s: float | None) -> bool:
        if missing and self.gate.first_seen(request_id):
            self.events.tell("defer", missing[0], text=request_id)
        return self.gate.check(request_id, missing, lost, self.settings.wait_s if wait_s is None else wait_s)

    def failed(self) -> list[str]:
        told = self.gate.take()
        for request_id, reason in told.items():
            log.warning("EC guard: request %s fails: %s", request_id, reason)
            self.events.tell("fail", text=f"{request_id}: {reason}")
            self.gate.forget(request_id)
        return list(told)


class GuardedConsumer(Consumer):
    """The PD's half: pulls on its own thread, and lets a request pass when its items are there."""

    def __init__(self, extra: dict[str, Any], tunables: Tunables) -> None:
        self.guard = _Gated(extra, "ec_consumer")
        settings = self.guard.settings
        self._notes: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self._store = Store(settings.staging_bytes, settings.staged_ttl_s, self._gone)
        self._puller = Puller(
            _Agent(),
            ["UCX"],
            settings,
            self._store,
            _Buffer,
            self._answer,
            self._notes.put,
            self.guard.events,
            self.guard.events.flush,
            extra.get("metadata_queue_max", 256),
        )
        self._outs: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        super().__init__(extra, tunables)

    def _receive(self) -> None:
        self._puller.run(self._pull, self._stop)
        self._pull.close(linger=0)
        for out in self._outs.values():
            out.close(linger=0)

    def _gone(self, mm_hash: str, why: str) -> None:
        self.guard.events.tell("evict", mm_hash, text=why)
        self._notes.put(Note("gone", mm_hash))

    def _answer(self, message: Message, status: str) -> None:
        address = (message.ack_host, message.ack_port)
        if not all(address):
            return
        with self._lock:
            self._encoders[message.engine_id] = address
        try:
            if address not in self._outs:
                self._outs[address] = self._to(address)
            ack = Ack(message.mm_hash, message.engine_id, status, self.engine_id)
            self._outs[address].send(msgspec.msgpack.encode(ack), zmq.NOBLOCK)
        except zmq.ZMQError as e:
            log.warning("EC guard: no acknowledgement to %s:%d: %s", *address, e)
        self.guard.events.tell("ack", message.mm_hash, peer=message.engine_id, text=status)

    def passes(self, request_id: str, hashes: list[str], wait_s: float | None) -> bool:
        """Whether a request may begin: all its items are pulled."""
        while not self._notes.empty():
            self.guard.board.take(self._notes.get())
        self._store.want(hashes)
        board = self.guard.board
        lost = next((f"{h}: {why}" for h in hashes if (why := board.bad(h))), "")
        return self.guard.check(request_id, [h for h in hashes if not board.staged(h)], lost, wait_s)

    def load(self, cache: dict[str, Tensor], hashes: Any) -> None:
        """Hand over what was pulled."""
        for mm_hash in hashes:
            buffer = self._store.get(mm_hash)
            if buffer is not None and mm_hash not in cache:
                cache[mm_hash] = buffer.tensor()
                self.guard.events.tell("load", mm_hash)

    def close(self) -> None:
        """At the end."""
        super().close()
        self.guard.events.close()


class GuardedProducer(Producer):
    """The encoder's half: publishes with a checksum, again when asked, and knows what arrived."""

    def __init__(self, extra: dict[str, Any], tunables: Tunables, faults: Faults) -> None:
        self.guard = _Gated(extra, "ec_producer")
        self._outcomes: dict[str, str] = {}
        self._greeted = False
        super().__init__(extra, tunables, faults)
        self._push.close(linger=0)
        self._link = Link(
            self._context,
            f"tcp://{extra.get('llm_host', '127.0.0.1')}:{extra.get('llm_pull_port', 16100)}",
            crc=False,
            on_state=self._turned,
            on_sent=self._sent,
            tick=self.guard.events.flush,
        )
        self._link_thread = threading.Thread(target=self._link.run, args=(self._stop,), daemon=True)
        self._link_thread.start()

    def _turned(self, _up: bool) -> None:
        self._greeted = False

    def _sent(self, message: Message, sent: bool) -> None:
        if sent:
            self.guard.events.tell("push", message.mm_hash, nbytes=message.tensor.nbytes)
        else:
            self._acks.put(Ack(message.mm_hash, self.engine_id, "unsent"))

    def passes(self, request_id: str, hashes: list[str], wait_s: float | None) -> bool:
        """Whether a request may begin: the way to the PD is open."""
        missing = ["the way to the PD"] if hashes and not self._link.up else []
        return self.guard.check(request_id, missing, "", wait_s)

    def save(self, mm_hash: str, tensor: Tensor) -> None:
        """Hold the tensor and tell the PD; one that is held already is told of again."""
        self._drain()
        if mm_hash not in self._held:
            address = self._arena.allocate(tensor.data)
            self._admit()
            self._held[mm_hash] = (address, time.monotonic())
            self.guard.events.tell("save", mm_hash, nbytes=len(tensor.data))
        if self._faults.take("push-drop"):
            return
        address = self._held[mm_hash][0]
        place = Place(address, len(tensor.data), 0, list(tensor.shape), "torch.float16")
        message = Message(
            engine_id=self.engine_id,
            mm_hash=mm_hash,
            agent_metadata=self._memory.metadata(self.engine_id),
            tensor=place,
            ack_host=self._ack_host,
            ack_port=self._ack_port,
            ec_guard_crc32=zlib.crc32(tensor.data) if self.guard.settings.crc else None,
        )
        self._outcomes.pop(mm_hash, None)
        self._link.publish(message, None)

    def outcomes(self, hashes: list[str]) -> dict[str, str]:
        """Wait a little for the PD's word; what became of each push."""
        wait_s = self.guard.settings.delivery_wait_s
        deadline = time.monotonic() + (
            wait_s if self._greeted else max(wait_s, FIRST_WAIT_S) if wait_s else 0
        )
        while any(h not in self._outcomes for h in hashes) and (left := deadline - time.monotonic()) > 0:
            try:
                self._settle(self._acks.get(timeout=left))
            except queue.Empty:
                break
        return {h: self._outcomes.pop(h, "pushed") for h in hashes}

    def _drain(self) -> None:
        while not self._acks.empty():
            self._settle(self._acks.get())

    def _settle(self, ack: Ack) -> None:
        words = {"ok": "delivered", "unsent": "unsent"}
        self._outcomes[ack.mm_hash] = word = words.get(ack.status, "refused")
        if word == "unsent":
            return
        self._greeted = True
        self.guard.events.tell("ack", ack.mm_hash, peer=ack.consumer_engine_id, text=word)
        if ack.mm_hash in self._held:
            log.debug("EC Nixl: ACK status=%s for mm_hash=%s, evicting", ack.status, ack.mm_hash)
            self._evict(ack.mm_hash)

    def close(self) -> None:
        """At the end."""
        self._stop.set()
        self._link.wake()
        self._link_thread.join(timeout=2)
        super().close()
        self.guard.events.close()

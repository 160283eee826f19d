"""The PD's half of the connector: learns of items, fetches those that the engine's step needs.

Everything but receiving runs on the engine's thread, so what waits here makes every request wait; and what is
raised here ends the engine. Both are the connector's ways, not the stand-in's.
"""

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

from eccon.sim.logs import CONNECTOR
from eccon.sim.nixl import Pull, RemoteAgents
from eccon.sim.tunables import Tunables
from eccon.sim.vision import Tensor
from eccon.sim.wire import Ack, Metadata, TensorInfo

__all__ = ["Consumer"]

log = logging.getLogger(CONNECTOR)

WAIT_S = 30.0
"""For one missing item, and for the pulls of one step. Not configurable in the connector either."""


class Consumer:
    """`load` is called once in every step of the engine."""

    def __init__(self, extra: dict[str, Any], tunables: Tunables) -> None:
        self._wait_s = tunables.scaled(WAIT_S)
        self._ping_s = tunables.scaled(extra.get("ping_interval_s", 60.0))
        self._max_pulls: int = extra.get("max_concurrent_pulls", 32)
        self._ack_max: int = extra.get("ack_queue_max", 256)
        self.engine_id = str(uuid.uuid4())
        self._incoming: queue.Queue[Metadata] = queue.Queue(maxsize=extra.get("metadata_queue_max", 256))
        self._arrived: dict[str, threading.Event] = {}
        self._agents = RemoteAgents()
        self._registry: dict[str, tuple[str, TensorInfo]] = {}
        self._pending: dict[str, Pull] = {}
        self._deferred: set[str] = set()
        self._ack_address: dict[str, tuple[str, int]] = {}
        self._ack_sent: set[str] = set()
        self._ack_sockets: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._encoders: dict[str, tuple[str, int]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        address = f"tcp://{extra.get('pull_host', '0.0.0.0')}:{extra.get('pull_port', 16100)}"
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.RCVHWM, 64)
        try:
            self._pull.bind(address)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._threads = [
            threading.Thread(target=self._receive, daemon=True, name="ec_nixl_push_receiver"),
            threading.Thread(target=self._ping, daemon=True, name="ec_nixl_ping"),
        ]
        for thread in self._threads:
            thread.start()
        log.info("RblnECNixlConnector (llm): PULL bound on %s", address)

    def load(self, cache: dict[str, Tensor], hashes: Iterable[str]) -> None:
        """Drain what encoders said, then fetch `hashes` into `cache`, and what an earlier step put off.

        At most `max_concurrent_pulls` are in flight; the rest wait for a later step, whether or not this
        step's prefill needs them. An item of which nothing was heard is waited for, each for itself.

        Raises:
            NixlError: an encoder cannot be reached, or does not hold what it once announced.
        """
        self._register()
        todo = list(self._deferred)
        self._deferred.clear()
        todo += [h for h in dict.fromkeys(hashes) if h not in set(todo)]
        for mm_hash in todo:
            if mm_hash in cache or mm_hash in self._pending:
                continue
            if len(self._pending) >= self._max_pulls:
                self._deferred.add(mm_hash)
                continue
            if mm_hash not in self._registry and not self._wait_for(mm_hash):
                log.error("EC Nixl: mm_hash=%s not available after timeout", mm_hash)
                continue
            engine_id, info = self._registry[mm_hash]
            self._pending[mm_hash] = self._agents.read(engine_id, info.base_addr, info.nbytes)
            log.debug("EC Nixl: initiated pull for mm_hash=%s", mm_hash)
        if self._pending:
            self._finish(cache)

    def _register(self) -> None:
        while True:
            try:
                meta = self._incoming.get_nowait()
            except queue.Empty:
                return
            if meta.engine_id in self._agents:
                self._agents.remove(meta.engine_id)
            self._agents.add(meta.engine_id, meta.agent_metadata)
            self._registry[meta.mm_hash] = (meta.engine_id, meta.tensor)
            if meta.ack_host and meta.ack_port:
                address = (meta.ack_host, meta.ack_port)
                self._ack_address[meta.mm_hash] = address
                with self._lock:
                    is_new = meta.engine_id not in self._encoders
                    self._encoders[meta.engine_id] = address
                if is_new:
                    log.info("EC Nixl: discovered encoder engine=%s at %s:%d", meta.engine_id, *address)
            log.debug(
                "EC Nixl: registered remote agent for engine=%s, mm_hash=%s", meta.engine_id, meta.mm_hash
            )

    def _wait_for(self, mm_hash: str) -> bool:
        with self._lock:
            arrived = self._arrived.setdefault(mm_hash, threading.Event())
        self._register()  # what came before the event was there has not set it
        deadline = time.monotonic() + self._wait_s
        while mm_hash not in self._registry:
            left = deadline - time.monotonic()
            if left <= 0:
                log.warning("EC Nixl: timed out waiting for mm_hash=%s (%.1fs)", mm_hash, WAIT_S)
                return False
            arrived.clear()
            arrived.wait(min(left, 1.0))
            self._register()
            if mm_hash in self._registry:
                log.debug("EC Nixl: mm_hash=%s discovered via PUSH notification", mm_hash)
        return True

    def _finish(self, cache: dict[str, Tensor]) -> None:
        deadline = time.monotonic() + self._wait_s
        while self._pending and time.monotonic() < deadline:
            for mm_hash, pull in list(self._pending.items()):
                if pull.state() == "DONE":
                    cache[mm_hash] = Tensor(tuple(self._registry[mm_hash][1].shape), pull.data())
                    pull.release()
                    del self._pending[mm_hash]
                    self._acknowledge(mm_hash, "ok")
                    log.debug("EC Nixl: pull complete for mm_hash=%s", mm_hash)
            if self._pending:
                time.sleep(0.001)
        if self._pending:
            log.warning("EC Nixl: %d pulls did not complete within timeout", len(self._pending))
            for mm_hash, pull in list(self._pending.items()):
                pull.release()
                del self._pending[mm_hash]
                self._acknowledge(mm_hash, "fail")

    def _acknowledge(self, mm_hash: str, status: str) -> None:
        """Once for a hash, ever: the connector never forgets that it did."""
        address = self._ack_address.get(mm_hash)
        if mm_hash in self._ack_sent or address is None:
            return
        out = self._ack_sockets.get(address)
        if out is None:
            out = self._ack_sockets[address] = self._to(address)
        ack = Ack(mm_hash, self._registry[mm_hash][0], status, self.engine_id)
        try:
            out.send(msgspec.msgpack.encode(ack), zmq.NOBLOCK)
            self._ack_sent.add(mm_hash)
        except zmq.Again:
            log.warning("EC Nixl: ACK send would block for mm_hash=%s (encoder ACK queue full)", mm_hash)

    def _to(self, address: tuple[str, int]) -> "zmq.Socket[bytes]":
        out = self._context.socket(zmq.PUSH)
        out.setsockopt(zmq.SNDHWM, self._ack_max)
        out.setsockopt(zmq.LINGER, 1000)
        out.connect(f"tcp://{address[0]}:{address[1]}")
        return out

    def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(Metadata)
        while not self._stop.is_set():
            if not self._pull.poll(200):
                continue
            try:
                meta = decoder.decode(self._pull.recv(zmq.NOBLOCK))
            except zmq.Again:
                continue
            except msgspec.DecodeError as e:
                log.warning("EC Nixl: failed to decode received metadata: %s", e)
                continue
            while not self._stop.is_set():
                try:
                    self._incoming.put(meta, timeout=0.2)
                    break
                except queue.Full:
                    continue
            else:
                break
            with self._lock:
                arrived = self._arrived.get(meta.mm_hash)
            if arrived is not None:
                arrived.set()
            log.debug(
                "EC Nixl: received metadata for mm_hash=%s from engine=%s", meta.mm_hash, meta.engine_id
            )
        self._pull.close(linger=0)

    def _ping(self) -> None:
        sockets: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        while not self._stop.wait(self._ping_s):
            with self._lock:
                known = list(self._encoders.items())
            for engine_id, address in known:
                if address not in sockets:
                    sockets[address] = self._to(address)
                with contextlib.suppress(zmq.Again):
                    ping = Ack("", engine_id, "ping", self.engine_id)
                    sockets[address].send(msgspec.msgpack.encode(ping), zmq.NOBLOCK)
        for out in sockets.values():
            out.close(linger=0)

    def close(self) -> None:
        """Stop the threads, then the sockets; waits at most a second for acknowledgements not sent yet."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2)
        for pull in self._pending.values():
            pull.release()
        self._context.destroy(linger=1000)

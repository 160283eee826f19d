"""The encoder's half of the connector: holds finished items, tells the PD of them, lets them go.

Log lines are the connector's own, word for word: they are all that the outside ever learns of a transfer.
"""

import logging
import queue
import socket
import threading
import time
import uuid
from typing import Any

import msgspec
import zmq

from eccon.sim.faults import Faults
from eccon.sim.logs import CONNECTOR
from eccon.sim.memory import Arena, MemoryServer
from eccon.sim.tunables import Tunables
from eccon.sim.vision import Tensor
from eccon.sim.wire import Ack, Metadata, TensorInfo

__all__ = ["Producer"]

log = logging.getLogger(CONNECTOR)


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1" if host in {"0.0.0.0", ""} else host, port), timeout=1.0):
            return True
    except OSError:
        return False


class Producer:
    """`save` runs on the engine's thread alone; acknowledgements arrive on one of their own."""

    def __init__(self, extra: dict[str, Any], tunables: Tunables, faults: Faults) -> None:
        self._faults = faults
        self._capacity: int = extra.get("producer_cache_capacity", 128)
        self._ttl_nominal_s: float = extra.get("producer_cache_ttl_s", 60.0)
        self._ttl_s = tunables.scaled(self._ttl_nominal_s)
        self._dead_nominal_s: float = extra.get("dead_threshold_s", 180.0)
        self._scale = tunables.scale
        self._ack_host: str = extra.get("ack_host", "127.0.0.1")
        self.engine_id = str(uuid.uuid4())
        self._arena = Arena()
        self._memory = MemoryServer(self._arena, self._ack_host)
        self._held: dict[str, tuple[int, float]] = {}
        self._last_seen: dict[str, float] = {}
        self._alive: dict[str, bool] = {}
        self._stop = threading.Event()
        self._connect(extra)

    def _connect(self, extra: dict[str, Any]) -> None:
        host: str = extra.get("llm_host", "127.0.0.1")
        port: int = extra.get("llm_pull_port", 16100)
        if not _listens(host, port):
            log.warning(
                "RblnECNixlConnector (encoder): LLM PULL port %s:%d is not accepting connections yet. "
                "Start the LLM first with `bash examples/optimum/ec_disagg/serve_ec_llm.sh` - "
                "ZMQ will still buffer messages and reconnectonce the LLM is up, but tail latency "
                "for the earliestrequests may be poor.",
                host,
                port,
            )
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._push.setsockopt(zmq.SNDHWM, 64)
        self._push.setsockopt(zmq.LINGER, 5000)
        self._push.connect(f"tcp://{host}:{port}")
        log.info("RblnECNixlConnector (encoder): PUSH connected to %s", f"tcp://{host}:{port}")
        acks_max: int = extra.get("ack_queue_max", 256)
        self._ack_socket = self._context.socket(zmq.PULL)
        self._ack_socket.setsockopt(zmq.RCVHWM, acks_max)
        self._ack_socket.bind(f"tcp://{self._ack_host}:{extra.get('ack_port', 0) or '*'}")
        endpoint = self._ack_socket.get_string(zmq.LAST_ENDPOINT)
        self._ack_port = int(endpoint.rsplit(":", 1)[1])
        self._acks: queue.Queue[Ack] = queue.Queue(maxsize=acks_max)
        self._thread = threading.Thread(target=self._receive, daemon=True, name="ec_nixl_ack_receiver")
        self._thread.start()
        log.info("RblnECNixlConnector (encoder): ACK PULL bound on %s:%d", self._ack_host, self._ack_port)

    def save(self, mm_hash: str, tensor: Tensor) -> None:
        """Hold the tensor and tell the PD, unless the hash is held already: then nothing is sent.

        Blocks without limit when 64 messages wait for a PD that is not there.
        """
        self._drain()
        if mm_hash in self._held:
            return
        address = self._arena.allocate(
            tensor.data
        )  # before making room: only an ACK frees its place for this one
        self._admit()
        self._held[mm_hash] = (address, time.monotonic())
        if self._faults.take("push-drop"):
            return
        message = Metadata(
            engine_id=self.engine_id,
            mm_hash=mm_hash,
            agent_metadata=self._memory.metadata(self.engine_id),
            tensor=TensorInfo(address, len(tensor.data), 0, list(tensor.shape), "torch.float16"),
            ack_host=self._ack_host,
            ack_port=self._ack_port,
        )
        self._push.send(msgspec.msgpack.encode(message))
        log.debug("EC Nixl: registered + pushed mm_hash=%s", mm_hash)

    def _admit(self) -> None:
        """Make room for one more: what is too old goes, then the oldest while there is no room."""
        now = time.monotonic()
        for mm_hash in [h for h, (_, since) in self._held.items() if now - since > self._ttl_s]:
            log.warning(
                "EC Nixl: TTL-evicting producer cache for mm_hash=%s (ttl=%.1fs, consumer never pulled or "
                "request_finished never fired)",
                mm_hash,
                self._ttl_nominal_s,
            )
            self._evict(mm_hash)
        while len(self._held) >= self._capacity:
            oldest = next(iter(self._held))
            log.warning(
                "EC Nixl: LRU-evicting producer cache for mm_hash=%s (capacity=%d reached)",
                oldest,
                self._capacity,
            )
            self._evict(oldest)

    def _evict(self, mm_hash: str) -> None:
        address, _ = self._held.pop(mm_hash)
        self._arena.free(address)

    def _drain(self) -> None:
        while True:
            try:
                ack = self._acks.get_nowait()
            except queue.Empty:
                return
            if ack.mm_hash in self._held:
                log.debug("EC Nixl: ACK status=%s for mm_hash=%s, evicting", ack.status, ack.mm_hash)
                self._evict(ack.mm_hash)

    def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(Ack)
        while not self._stop.is_set():
            ready = self._ack_socket.poll(200)
            self._watch()
            if not ready:
                continue
            try:
                ack = decoder.decode(self._ack_socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                continue
            except msgspec.DecodeError as e:
                log.warning("EC Nixl: failed to decode ACK: %s", e)
                continue
            self._seen(ack.consumer_engine_id)
            while ack.status != "ping" and not self._stop.is_set():
                try:
                    self._acks.put(ack, timeout=0.2)
                    break
                except queue.Full:
                    continue
        self._ack_socket.close(linger=0)

    def _seen(self, consumer: str) -> None:
        if not consumer:
            return
        self._last_seen[consumer] = time.monotonic()
        before = self._alive.get(consumer)
        self._alive[consumer] = True
        if before is None:
            log.info("EC Nixl: first contact from consumer engine=%s", consumer)
        elif not before:
            log.warning(
                "EC Nixl: consumer engine=%s RECOVERED (ACK/ping received after dead threshold)", consumer
            )

    def _watch(self) -> None:
        now = time.monotonic()
        for consumer, seen in list(self._last_seen.items()):
            if self._alive[consumer] and now - seen > self._dead_nominal_s * self._scale:
                self._alive[consumer] = False
                silent = (now - seen) / self._scale if self._scale else self._dead_nominal_s
                log.warning(
                    "EC Nixl: consumer engine=%s DEAD (no ACK/ping for %.1fs, threshold=%.1fs) — logging "
                    "only, registered caches left to TTL backstop",
                    consumer,
                    silent,
                    self._dead_nominal_s,
                )

    def close(self) -> None:
        """Let everything go; waits at most a second for what was not sent yet."""
        self._stop.set()
        self._thread.join(timeout=2)
        self._memory.close()
        self._context.destroy(linger=1000)

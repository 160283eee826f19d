"""The PD's thread: takes what encoders announce and pulls it at once. No fault of one item leaves it.

Every NIXL call of the PD is made here. Of one encoder one item is pulled at a time: its agent is registered
anew with each message (its memory map changes), and that would break a pull in flight.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from .events import Events
from .log import logger
from .notes import Note
from .pull import Pull, PullError
from .settings import Settings
from .store import Store
from .wire import Message, crc32_at, decode, fault

__all__ = ["Puller"]

ABANDON_S = 60.0
"""After that long an overdue pull no longer keeps its encoder's other items waiting."""
IDLE_PEER_S = 600.0
BUSY_MS, SLOW_MS, IDLE_MS = 1, 20, 100
SLOW_AFTER_S = 0.2


class _Peer:
    """One encoder engine."""

    __slots__ = ("active", "engine_id", "heard", "message", "overdue", "queue", "started")

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.queue: deque[tuple[Message, float]] = deque()
        self.active: Pull | None = None
        self.message: Message | None = None
        self.started = 0.0
        self.overdue = False
        self.heard = 0.0


class Puller:
    """`run` is the thread's body."""

    def __init__(
        self,
        agent: Any,
        backends: Sequence[str],
        settings: Settings,
        store: Store,
        allocate: Callable[[int], Any],
        acknowledge: Callable[[Message, str], None],
        say: Callable[[Note], None],
        events: Events,
        tick: Callable[[], None],
        queue_max: int = 256,
    ) -> None:
        self._agent = agent
        self._backends = backends
        self._settings = settings
        self._store = store
        self._allocate = allocate
        self._acknowledge = acknowledge
        self._say = say
        self._events = events
        self._tick = tick
        self._queue_max = queue_max
        self._peers: dict[str, _Peer] = {}
        self._agents: dict[str, Any] = {}
        self._abandoned: list[Pull] = []
        self._swept = 0.0

    def run(self, incoming: "zmq.Socket[bytes]", stop: threading.Event) -> None:
        """Until `stop` is set."""
        while not stop.is_set():
            try:
                self._round(incoming)
            except Exception:  # noqa: BLE001  the thread must outlive whatever comes in a message
                logger.exception("EC guard: the puller stumbled; it goes on")
                stop.wait(0.05)
        self._end()

    def _round(self, incoming: "zmq.Socket[bytes]") -> None:
        queued = sum(len(p.queue) for p in self._peers.values())
        if queued >= self._queue_max:
            time.sleep(BUSY_MS / 1000)
        elif incoming.poll(self._patience()):
            for _ in range(self._queue_max - queued):
                try:
                    raw = incoming.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._receive(raw)
        for peer in tuple(self._peers.values()):
            self._advance(peer)
        self._tick()
        now = time.monotonic()
        if now - self._swept > 1.0:
            self._swept = now
            self._sweep(now)

    def _patience(self) -> int:
        now = time.monotonic()
        started = [p.started for p in self._peers.values() if p.active is not None]
        if not started:
            return IDLE_MS
        return BUSY_MS if now - max(started) < SLOW_AFTER_S else SLOW_MS

    def _receive(self, raw: bytes) -> None:
        try:
            message = decode(raw)
        except msgspec.DecodeError as e:
            logger.warning("EC Nixl: failed to decode received metadata: %s", e)
            self._events.tell("fail", text=f"not understood: {e}")
            return
        mm_hash, engine_id = message.mm_hash, message.engine_id
        logger.debug("EC Nixl: received metadata for mm_hash=%s from engine=%s", mm_hash, engine_id)
        self._events.tell("meta", mm_hash, peer=engine_id, nbytes=message.tensor.nbytes)
        if reason := fault(message.tensor, self._settings.staging_bytes):
            self._lost(message, reason)
            return
        self._say(Note("pending", mm_hash))
        now = time.monotonic()
        peer = self._peers.setdefault(engine_id, _Peer(engine_id))
        peer.heard = now
        peer.queue.append((message, now))

    def _advance(self, peer: _Peer) -> None:
        if peer.active is not None and peer.message is not None:
            self._follow(peer, peer.active, peer.message)
        if peer.active is not None:
            while peer.queue and time.monotonic() - peer.queue[0][1] > self._settings.pull_timeout_s:
                message, _ = peer.queue.popleft()
                self._lost(message, "its encoder does not answer: an earlier pull hangs")
            return
        while peer.queue and peer.active is None:
            message, _ = peer.queue.popleft()
            self._start(peer, message)

    def _start(self, peer: _Peer, message: Message) -> None:
        mm_hash, crc = message.mm_hash, message.ec_guard_crc32
        logger.debug("EC Nixl: initiated pull for mm_hash=%s", mm_hash)
        self._events.tell("pull_start", mm_hash, peer=peer.engine_id, nbytes=message.tensor.nbytes)
        if self._settings.crc and crc is not None and self._store.renew(mm_hash, crc):
            # The very bytes are here already: the encoder only wants to know it.
            self._arrived(message, "held already")
            return
        try:
            remote = self._register(message)
            peer.active = Pull(self._agent, self._backends, self._allocate, remote, message)
        except PullError as e:
            self._lost(message, str(e))
            return
        peer.message, peer.started, peer.overdue = message, time.monotonic(), False
        self._follow(peer, peer.active, message)

    def _register(self, message: Message) -> Any:
        """The encoder's agent with the memory map of this message."""
        engine_id = message.engine_id
        # Out of the table first: when what follows fails, a dead name must not stay behind.
        old = self._agents.pop(engine_id, None)
        try:
            if old is not None:
                self._agent.remove_remote_agent(old)
            remote = self._agents[engine_id] = self._agent.add_remote_agent(message.agent_metadata)
        except Exception as e:
            raise PullError(f"its encoder's agent: {type(e).__name__}: {e}") from e
        return remote

    def _follow(self, peer: _Peer, pull: Pull, message: Message) -> None:
        try:
            state = pull.state()
        except PullError as e:
            self._finish(peer, pull)
            self._lost(message, str(e))
            return
        if state == "PROC":
            self._still(peer, pull, message)
            return
        self._finish(peer, pull)
        crc = message.ec_guard_crc32
        nbytes = message.tensor.nbytes
        if self._settings.crc and crc is not None and crc32_at(pull.address, nbytes) != crc:
            self._lost(message, "other bytes than announced: its encoder has let it go meanwhile")
            return
        self._store.put(message.mm_hash, pull.tensor, nbytes, crc)
        self._arrived(message, "")

    def _still(self, peer: _Peer, pull: Pull, message: Message) -> None:
        taken = time.monotonic() - peer.started
        if taken > self._settings.pull_timeout_s and not peer.overdue:
            # Handle and buffer stay: NIXL may write into it yet, and what comes late is as good.
            peer.overdue = True
            self._tell_lost(message, f"not pulled within {self._settings.pull_timeout_s:g} s")
        if taken > self._settings.pull_timeout_s + ABANDON_S:
            self._abandoned.append(pull)
            peer.active = peer.message = None

    def _finish(self, peer: _Peer, pull: Pull) -> None:
        peer.active = peer.message = None
        pull.release()

    def _arrived(self, message: Message, how: str) -> None:
        logger.debug("EC Nixl: pull complete for mm_hash=%s", message.mm_hash)
        self._say(Note("staged", message.mm_hash))
        self._events.tell(
            "pull_done", message.mm_hash, peer=message.engine_id, nbytes=message.tensor.nbytes, text=how
        )
        self._acknowledge(message, "ok")

    def _lost(self, message: Message, reason: str) -> None:
        self._tell_lost(message, reason)
        self._acknowledge(message, "fail")

    def _tell_lost(self, message: Message, reason: str) -> None:
        logger.warning("EC guard: mm_hash=%s is lost: %s", message.mm_hash, reason)
        self._events.tell("fail", message.mm_hash, peer=message.engine_id, text=reason)
        if message.mm_hash not in self._store:
            self._say(Note("bad", message.mm_hash, reason, time.time()))

    def _sweep(self, now: float) -> None:
        self._store.sweep()
        for pull in tuple(self._abandoned):
            try:
                over = pull.state() != "PROC"
            except PullError:
                over = True
            if over:
                self._abandoned.remove(pull)
                pull.release()
        for peer in tuple(self._peers.values()):
            if peer.active is None and not peer.queue and now - peer.heard > IDLE_PEER_S:
                del self._peers[peer.engine_id]
                old = self._agents.pop(peer.engine_id, None)
                if old is not None:
                    self._agent.remove_remote_agent(old)

    def _end(self) -> None:
        """What is not PROC is released; the rest ends with the process."""
        pulls = [p.active for p in self._peers.values() if p.active is not None]
        for pull in (*pulls, *self._abandoned):
            try:
                over = pull.state() != "PROC"
            except PullError:
                over = True
            if over:
                pull.release()

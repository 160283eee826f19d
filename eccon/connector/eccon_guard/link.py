"""The encoder's thread: sends what was published to the PD, and knows whether the way there is open.

ZMQ_IMMEDIATE keeps messages out of queues to a PD that is not there; a monitor tells of connections made and
lost; heartbeats find a PD that is gone without a word.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from .log import logger
from .wire import Message, crc32_at, encode

__all__ = ["Link"]

SEND_MS = 1000
"""Longest that a message waits for room; then it counts as not sent."""
TICK_S = 0.1
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 3000, 9000
WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Link:
    """`publish` from the engine's thread, `run` is this one's body, and owns the socket."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        *,
        crc: bool,
        on_state: Callable[[bool], None],
        on_sent: Callable[[Message, bool], None],
        tick: Callable[[], None],
    ) -> None:
        self._context = context
        self._address = address
        self._crc = crc
        self._on_state = on_state
        self._on_sent = on_sent
        self._tick = tick
        self._queue: queue.SimpleQueue[tuple[Message, Any] | None] = queue.SimpleQueue()
        self.up = False

    def publish(self, message: Message, memory: Any) -> None:
        """Have a message sent. Returns at once; `memory` is held until then."""
        self._queue.put((message, memory))

    def wake(self) -> None:
        """Let `run` look at its stop event now."""
        self._queue.put(None)

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set."""
        out = self._context.socket(zmq.PUSH)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.SNDHWM, 64),
            (zmq.LINGER, 500),
            (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        ):
            out.setsockopt(option, value)
        monitor = out.get_monitor_socket(WATCHED)
        out.connect(self._address)
        try:
            while not stop.is_set():
                try:
                    self._round(out, monitor)
                except zmq.ContextTerminated:
                    return
                except Exception:  # noqa: BLE001  the thread must outlive it
                    logger.exception("EC guard: the link stumbled; it goes on")
                    stop.wait(0.05)
        finally:
            out.disable_monitor()
            monitor.close(linger=0)
            out.close()

    def _round(self, out: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
        try:
            job = self._queue.get(timeout=TICK_S)
        except queue.Empty:
            job = None
        while monitor.poll(0):
            event = recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
            self._turn(up=event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._tick()
        if job is not None:
            self._send(out, *job)

    def _turn(self, *, up: bool) -> None:
        if up != self.up:
            self.up = up
            logger.info("EC guard: the way to the PD at %s is %s", self._address, "open" if up else "closed")
            self._on_state(up)

    def _send(self, out: "zmq.Socket[bytes]", message: Message, memory: Any) -> None:
        if self._crc:
            info = message.tensor
            message = msgspec.structs.replace(message, ec_guard_crc32=crc32_at(info.base_addr, info.nbytes))
        del memory
        raw = encode(message)
        sent = False
        if out.poll(SEND_MS, zmq.POLLOUT):
            try:
                out.send(raw, zmq.NOBLOCK)
                sent = True
            except zmq.Again:
                logger.debug("EC guard: no room for mm_hash=%s after all", message.mm_hash)
        if sent:
            logger.debug("EC Nixl: registered + pushed mm_hash=%s", message.mm_hash)
        else:
            logger.warning("EC guard: mm_hash=%s was not sent: no PD at %s", message.mm_hash, self._address)
        self._on_sent(message, sent)

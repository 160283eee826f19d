"""The process `VLLM::EngineCore`: connector, scheduler and memory, apart from the API server that forked it.

It does not die with its parent: an orphan keeps its ports and its memory, as the real one does.
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import uuid
from types import FrameType

from eccon.sim import logs, milestones
from eccon.sim.consumer import Consumer
from eccon.sim.faults import Faults
from eccon.sim.flags import CONNECTOR, GUARDED, Serve
from eccon.sim.guarded import GuardedConsumer, GuardedProducer
from eccon.sim.ipc import Abort, Add, Dead, Link, Ready
from eccon.sim.modeldir import Model
from eccon.sim.process import set_title
from eccon.sim.producer import Producer
from eccon.sim.scheduler import Scheduler
from eccon.sim.tunables import Tunables

__all__ = ["fork", "main"]

log = logging.getLogger("vllm.v1.engine.core")
worker_log = logging.getLogger(logs.CONNECTOR)

ORPHAN_EXIT_S = 5.0
"""What an orphaned engine takes to end after SIGTERM: 5 to 10 s were seen."""


class _Engine:
    def __init__(
        self, serve: Serve, model: Model, tunables: Tunables, faults: Faults, slots: int, link: Link
    ) -> None:
        self._serve = serve
        self._model = model
        self._tunables = tunables
        self._faults = faults
        self._slots = slots
        self._link = link
        self._inbox: queue.SimpleQueue[Add | Abort | None] = queue.SimpleQueue()
        self._stopping = False
        self.producer: Producer | None = None
        self.consumer: Consumer | None = None
        self._connector = GUARDED if serve.guarded else CONNECTOR

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        log.info("[shutdown] EngineCore: trigger received signal=%s", signal.Signals(number).name)
        self._stopping = not self._faults.take("ignore-term")
        self._inbox.put(None)

    def load(self) -> Scheduler:
        """Take the time that loading takes, and say what is done. The connector is made on the way."""
        say = milestones.Engine(self._serve, self._model, self._tunables)
        say.initializing()
        if self._serve.role != "none":
            engine_id = str(uuid.uuid4())
            say.connector(engine_id)
            if self._serve.role == "producer":
                producer = GuardedProducer if self._serve.guarded else Producer
                self.producer = producer(self._serve.extra, self._tunables, self._faults)
            else:
                consumer = GuardedConsumer if self._serve.guarded else Consumer
                self.consumer = consumer(self._serve.extra, self._tunables)
            worker_log.info("%s created (role=%s)", self._connector, "WORKER")
        if self._faults.take("start-fail"):
            msg = "Failed to load the model (asked for by ECCON_SIM_FAULT)"
            raise RuntimeError(msg)
        say.weights()
        while self._faults.take("start-hang"):
            time.sleep(0.2)
        say.kv_cache(self._slots)
        if self._serve.role != "none":
            say.connector(engine_id)
            worker_log.info("%s created (role=%s)", self._connector, "SCHEDULER")
        return Scheduler(
            self._model,
            self._tunables,
            self._faults,
            self._slots,
            self.producer,
            self.consumer,
            self._link.send,
        )

    def run(self, scheduler: Scheduler) -> None:
        """Until told to stop. An error in a step is the end of the engine."""
        threading.Thread(target=self._listen, daemon=True, name="process_input").start()
        self._link.send(Ready())
        while not self._stopping:
            self._take(scheduler, wait=not scheduler.has_work)
            if scheduler.has_work and not self._stopping:
                scheduler.step()
        log.info("[shutdown] EngineCore: exiting busy loop")
        if self._link.orphaned:
            time.sleep(self._tunables.scaled(ORPHAN_EXIT_S))

    def _take(self, scheduler: Scheduler, *, wait: bool) -> None:
        while wait or not self._inbox.empty():
            message = self._inbox.get()
            wait = False
            if isinstance(message, Add):
                scheduler.add(message)
            elif isinstance(message, Abort):
                scheduler.abort(message.id)

    def _listen(self) -> None:
        while (message := self._link.receive()) is not None:
            self._inbox.put(message)

    def close(self) -> None:
        for connector in (self.producer, self.consumer):
            if connector is not None:
                connector.close()


def main(
    end: socket.socket, serve: Serve, model: Model, tunables: Tunables, faults: Faults, slots: int
) -> int:
    """Run the engine; returns the exit code."""
    set_title("VLLM::EngineCore")
    logs.prefix("EngineCore")
    logs.configure()
    link = Link(end)
    engine = _Engine(serve, model, tunables, faults, slots, link)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    try:
        scheduler = engine.load()
    except Exception:
        log.exception("EngineCore failed to start.")
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, engine.on_signal)
    try:
        engine.run(scheduler)
    except Exception:
        log.exception("EngineCore encountered a fatal error.")
        link.send(Dead())
        return 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    engine.close()
    return 0


def fork(end: socket.socket, others: list[socket.socket], *rest: object) -> int:
    """Fork the engine off and return its pid. `others` are the parent's sockets, closed in the child."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for other in others:
            other.close()
        code = main(end, *rest)  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

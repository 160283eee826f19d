"""Steps of the engine: what one step takes up, and what it costs.

A step of an encoder is one request, first in, first out. A step of the PD is one prefill when a slot is free
and somebody waits, else one token for everybody who runs.
"""

import os
import time
from collections import deque
from collections.abc import Callable

from eccon.sim.cache import EncoderCache
from eccon.sim.consumer import Consumer
from eccon.sim.faults import Faults
from eccon.sim.guarded import GuardedConsumer, GuardedProducer
from eccon.sim.ipc import Add, FromEngine, Item, Output, Refused, Stats, Step
from eccon.sim.modeldir import Model
from eccon.sim.process import kill_tree
from eccon.sim.producer import Producer
from eccon.sim.requests import Running, answer
from eccon.sim.tunables import Tunables
from eccon.sim.vision import encode

__all__ = ["CACHE_TOKENS", "Scheduler"]

CACHE_TOKENS = 2048
"""vLLM's room for encoder outputs unless one item is larger: its default of tokens in a batch."""
KV_TOKENS = 65536
HELD_S = 0.002
"""Rest of a step in which everybody is held back by the guard."""


class Scheduler:
    """Owns requests, cache and connector. `step` blocks as long as the work takes, and that is the point."""

    def __init__(
        self,
        model: Model,
        tunables: Tunables,
        faults: Faults,
        slots: int,
        producer: Producer | None,
        consumer: Consumer | None,
        send: Callable[[FromEngine], None],
    ) -> None:
        self._model = model
        self._tunables = tunables
        self._faults = faults
        self._slots = slots
        self._producer = producer
        self._consumer = consumer
        self._send = send
        self._parent = os.getppid()
        largest = model.max_pixels // model.factor**2
        room = max(CACHE_TOKENS, largest) if tunables.cache_tokens is None else tunables.cache_tokens
        self._cache = EncoderCache(room)
        self._waiting: deque[Add] = deque()
        self._running: list[Running] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    def add(self, request: Add) -> None:
        """At the end of the queue."""
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Forget a request wherever it is."""
        gone = [r for r in self._waiting if r.id == request_id]
        gone += [r.add for r in self._running if r.add.id == request_id]
        self._waiting = deque(r for r in self._waiting if r.id != request_id)
        self._running = [r for r in self._running if r.add.id != request_id]
        for add in gone[:1]:
            self._forget(add)
            for side in (self._producer, self._consumer):
                if isinstance(side, GuardedProducer | GuardedConsumer):
                    side.guard.gate.forget(add.id)
        if gone:
            self._report([])

    def step(self) -> None:
        """One step.

        Raises:
            RuntimeError: an item is not there when its prefill needs it.
            NixlError: an encoder's memory cannot be read.
        """
        if self._producer is not None:
            if (first := self._next(self._producer)) is not None:
                self._encode_step(self._producer, first)
            return
        starting = self._next(self._consumer) if len(self._running) < self._slots else None
        if starting is None and not self._running:
            return
        moved = self._step_of_pd(starting)
        ended = [run for run, output in moved if output.finish_reason is not None]
        self._running = [run for run in self._running if run not in ended]
        for add in {run.add.id: run.add for run in ended}.values():
            if not any(run.add.id == add.id for run in self._running):
                self._forget(add)
        self._report([output for _, output in moved])

    def _next(self, connector: Producer | Consumer | None) -> Add | None:
        """Who is first, of those that a guard lets pass; what waited in vain is failed."""
        if not isinstance(connector, GuardedConsumer | GuardedProducer):
            return self._waiting.popleft() if self._waiting else None
        found = None
        for add in self._waiting:
            hashes = [i.mm_hash for i in add.items]
            if not hashes or connector.passes(add.id, hashes, add.wait_s):
                found = add
                break
        gone = set(connector.guard.failed())
        for add in [a for a in self._waiting if a.id in gone]:
            self._waiting.remove(add)
            self._send(Refused(add.id, silent=True))
        if found is not None:
            self._waiting.remove(found)
        elif not self._running:
            time.sleep(HELD_S)
        return found

    def _step_of_pd(self, starting: Add | None) -> list[tuple[Running, Output]]:
        # The connector is asked for the items of all who wait as well, like vllm-rbln's scheduler does.
        adds = ([starting] if starting else []) + list(self._waiting)
        if isinstance(self._consumer, GuardedConsumer):
            adds = adds[: 1 if starting else 0]
        wanted = [i.mm_hash for add in adds for i in add.items]
        if starting:
            for item in starting.items:
                self._cache.use(starting.id, item.mm_hash)
        if self._consumer is not None:
            self._consumer.load(self._cache.tensors, wanted)
        if starting is None:
            time.sleep(self._tunables.token_s)
            return [(run, run.next()) for run in self._running]
        self._prefill(starting)
        return [(run, run.next()) for run in self._running if run.add.id == starting.id]

    def _prefill(self, add: Add) -> None:
        tensors = []
        for item in add.items:
            if self._consumer is None and item.mm_hash not in self._cache.tensors:
                self._encode(item)
            tensor = self._cache.tensors.get(item.mm_hash)
            if tensor is None:
                msg = f"Encoder cache miss for {item.mm_hash}."
                raise RuntimeError(msg)
            tensors.append(tensor)
        self._cache.trim()
        time.sleep(self._tunables.prefill_s)
        words = answer(add, tensors)
        prompt = add.text_tokens + sum(t.shape[0] for t in tensors)
        self._running += [Running(add, i, words, prompt) for i in range(add.n)]

    def _encode_step(self, producer: Producer, add: Add) -> None:
        guarded = isinstance(producer, GuardedProducer)
        if add.items and self._faults.take("encode-error"):
            self._send(Refused(add.id))
            return
        for item in add.items:
            self._cache.use(add.id, item.mm_hash)
            if item.mm_hash in self._cache.tensors:
                if guarded:
                    producer.save(item.mm_hash, self._cache.tensors[item.mm_hash])
                continue  # without a guard neither encoded nor announced again
            self._encode(item)
            producer.save(item.mm_hash, self._cache.tensors[item.mm_hash])
            if self._faults.take("die-after-push"):
                time.sleep(0.1)  # ZeroMQ sends in its own time
                kill_tree(self._parent)
        self._forget(add)
        self._cache.trim()
        prompt = add.text_tokens + sum(i.tokens for i in add.items)
        told = None
        if isinstance(producer, GuardedProducer):
            told = producer.outcomes([i.mm_hash for i in add.items])
        self._report([Output(add.id, i, "", 0, "stop", prompt, told) for i in range(add.n)])

    def _encode(self, item: Item) -> None:
        while self._faults.named("encode-hang"):
            time.sleep(0.02)
        if self._faults.take("encode-crash"):
            msg = "Encoder failed."
            raise RuntimeError(msg)
        if item.picture is None:
            msg = f"Encoder cache miss for {item.mm_hash}."
            raise RuntimeError(msg)
        mpix = item.tokens * self._model.factor**2 / 1e6
        time.sleep(self._tunables.encode_s + mpix * self._tunables.encode_s_per_mpix)
        self._cache.tensors[item.mm_hash] = encode(self._model, item.picture, item.tokens)

    def _forget(self, add: Add) -> None:
        self._cache.release(add.id, [i.mm_hash for i in add.items])

    def _report(self, outputs: list[Output]) -> None:
        used = sum(r.tokens for r in self._running) / KV_TOKENS
        running = len({r.add.id for r in self._running})
        self._send(Step(outputs, Stats(running, len(self._waiting), min(1.0, used))))

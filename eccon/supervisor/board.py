"""The daemon's one `ClusterState`: takes what owners and signals say, tells subscribers what changed.

What an operator waits for (a state, a reason, a pid) goes out at once; figures at most twice a second for
each process; nothing goes out that is as before. Every change has a number and is encoded once for all
subscribers.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

import msgspec

from eccon.model import (
    EVENTS_KEPT,
    TRACES_KEPT,
    Alarm,
    Change,
    ClusterChanged,
    ClusterInfo,
    ClusterState,
    EventLogged,
    LogEvent,
    Process,
    ProcessChanged,
    ProcessGone,
    Trace,
    TraceChanged,
)
from eccon.supervisor.waiting import happened

__all__ = ["Board", "Numbered"]

FIGURES_EVERY_S = 0.5
TRACES_EVERY_S = 0.2
RING = 4096
"""Changes kept for a subscriber that comes back."""
BACKLOG = 2048
"""Changes that a slow subscriber may be behind; then it gets a snapshot instead."""
FIGURES = frozenset(
    {"cpu_percent", "rss_bytes", "encoder", "pd", "transfer", "milestone", "engine", "npus", "connector"}
)
QUIET = frozenset(
    {
        "requests",
        "inflight",
        "requests_per_s",
        "items_per_s",
        "ttft",
        "transfer",
        "lost_log_lines",
        "spare_npus",
    }
)

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
history = logging.getLogger("eccon.history")

Numbered = tuple[int, Literal["snapshot", "change"], bytes]
"""Sequence number, event name, JSON."""


class Board:
    """See the module. All calls come from the event loop's thread."""

    def __init__(self, cluster: ClusterInfo) -> None:
        self._cluster = cluster
        self._processes: dict[str, Process] = {}
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self._events: deque[LogEvent] = deque(maxlen=EVENTS_KEPT)
        self._alarms: dict[str, Alarm] = {}
        # Numbers go on over daemons: a client that resumes must not take an old number for a new one.
        self._seq = int(time.time() * 1000)
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=RING)
        self._subscribers: set[asyncio.Queue[Numbered | None]] = set()
        self._later: dict[str, asyncio.TimerHandle] = {}
        self._told_at: dict[str, float] = {}
        self._dirty_traces: dict[str, None] = {}
        self._listeners: set[Callable[[], None]] = set()
        self._closed = False

    @property
    def cluster(self) -> ClusterInfo:
        """The cluster's own figures."""
        return self._cluster

    @property
    def processes(self) -> tuple[Process, ...]:
        """In display order."""
        return tuple(self._processes.values())

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Those in force: critical ones first, then the oldest."""
        return tuple(sorted(self._alarms.values(), key=lambda a: a.severity != "critical"))

    @property
    def events(self) -> tuple[LogEvent, ...]:
        """The history, newest last."""
        return tuple(self._events)

    def process(self, name: str) -> Process | None:
        """What is known of one process."""
        return self._processes.get(name)

    def trace_of(self, trace_id: str) -> Trace | None:
        """One request's trace."""
        return self._traces.get(trace_id)

    def snapshot(self) -> ClusterState:
        """Everything, as it is now."""
        return ClusterState(
            seq=self._seq,
            cluster=self._cluster,
            processes=self.processes,
            traces=tuple(self._traces.values()),
            events=self.events,
            alarms=self.alarms,
        )

    def put(self, process: Process) -> None:
        """A process that is new, or all of it anew."""
        if self._processes.get(process.name) == process:
            return
        self._processes[process.name] = process
        self._tell_process(process.name)

    def update(self, name: str, **changes: Any) -> None:
        """Some fields of a process; one that is not there (any more) is left alone."""
        before = self._processes.get(name)
        if before is None:
            return
        changed = {k: v for k, v in changes.items() if getattr(before, k) != v}
        if not changed:
            return
        self._processes[name] = msgspec.structs.replace(before, **changed)
        self._throttle(name, changed.keys() <= FIGURES, lambda: self._tell_process(name))

    def remove(self, name: str) -> None:
        """A process that left the topology."""
        if self._processes.pop(name, None):
            self._emit(lambda seq: ProcessGone(seq, name))

    def set_cluster(self, **changes: Any) -> None:
        """Some fields of the cluster."""
        changed = {k: v for k, v in changes.items() if getattr(self._cluster, k) != v}
        if changed:
            self._cluster = msgspec.structs.replace(self._cluster, **changed)
            self._throttle("", changed.keys() <= QUIET, self._tell_cluster)

    def raise_alarm(self, alarm: Alarm, *, instead_of: str = "") -> None:
        """Sets an alarm; one of the same key keeps its begin, one of the key `instead_of` ends."""
        before = self._alarms.get(alarm.key)
        if before:
            alarm = msgspec.structs.replace(alarm, since=before.since)
        if self._alarms.pop(instead_of, None) or before != alarm:
            self._alarms[alarm.key] = alarm
            self._tell_cluster()

    def end_alarm(self, key: str) -> None:
        """Ends an alarm, if it is there."""
        if self._alarms.pop(key, None):
            self._tell_cluster()

    def log(self, subject: str, text: str, severity: Literal["info", "warning", "error"] = "info") -> None:
        """A line for the history."""
        event = LogEvent(at=time.time(), subject=subject, text=text, severity=severity)
        self._events.append(event)
        history.log(LEVELS[severity], "%s: %s", subject, text)
        self._emit(lambda seq: EventLogged(seq, event))

    def restore_events(self, events: list[LogEvent]) -> None:
        """The history of the daemon before."""
        self._events.extendleft(reversed(events))

    def trace(self, trace: Trace) -> list[str]:
        """A trace, new or anew. Ids of those that fell out."""
        if self._traces.get(trace.id) == trace:
            return []
        self._traces[trace.id] = trace
        gone = []
        while len(self._traces) > TRACES_KEPT:
            gone.append(self._traces.popitem(last=False)[0])
        self._dirty_traces[trace.id] = None
        self._throttle("trace", True, self._tell_traces, TRACES_EVERY_S)
        return gone

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` at every change that goes out, until the returned function is called."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    async def until(self, true: Callable[[], bool], timeout: float | None) -> bool:
        """Waits for a condition over what is shown here; False when time ran out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        woken = asyncio.Event()
        unlisten = self.listen(woken.set)
        try:
            while not true():
                woken.clear()
                left = None if deadline is None else deadline - time.monotonic()
                if not await happened(woken, left):
                    return true()
            return True
        finally:
            unlisten()

    def close(self) -> None:
        """Ends every subscription."""
        self._closed = True
        for timer in self._later.values():
            timer.cancel()
        for queue in self._subscribers:
            _put_last(queue)

    async def subscribe(self, after: int | None = None) -> AsyncGenerator[Numbered, None]:
        """Changes from number `after` on if they are still known, else a snapshot and what follows it."""
        queue: asyncio.Queue[Numbered | None] = asyncio.Queue(BACKLOG)
        missed = self._since(after)
        self._subscribers.add(queue)
        try:
            if missed is None:
                yield self._snapshot_event()
            else:
                for seq, data in missed:
                    yield seq, "change", data
            while not (self._closed and queue.empty()):
                item = await queue.get()
                if item is not None:
                    yield item
                elif not self._closed:
                    # It fell behind: all of it anew.
                    while not queue.empty():
                        queue.get_nowait()
                    yield self._snapshot_event()
        finally:
            self._subscribers.discard(queue)

    def _snapshot_event(self) -> Numbered:
        return self._seq, "snapshot", msgspec.json.encode(self.snapshot())

    def _since(self, after: int | None) -> list[tuple[int, bytes]] | None:
        if after is None or after > self._seq:
            return None
        if after == self._seq:
            return []
        if not self._ring or self._ring[0][0] > after + 1:
            return None
        return [row for row in self._ring if row[0] > after]

    def _throttle(
        self, key: str, quiet: bool, tell: Callable[[], None], every: float = FIGURES_EVERY_S
    ) -> None:
        if key in self._later:
            if quiet:
                return
            self._later.pop(key).cancel()
        wait = self._told_at.get(key, 0.0) + every - time.monotonic()
        if not quiet or wait <= 0:
            self._told_at[key] = time.monotonic()
            tell()
            return

        def due() -> None:
            self._later.pop(key, None)
            self._told_at[key] = time.monotonic()
            tell()

        self._later[key] = asyncio.get_running_loop().call_later(wait, due)

    def _tell_process(self, name: str) -> None:
        if process := self._processes.get(name):
            self._emit(lambda seq: ProcessChanged(seq, process))

    def _tell_cluster(self) -> None:
        self._emit(lambda seq: ClusterChanged(seq, self._cluster, self.alarms))

    def _tell_traces(self) -> None:
        dirty, self._dirty_traces = self._dirty_traces, {}
        for trace_id in dirty:
            if trace := self._traces.get(trace_id):
                self._emit(lambda seq, trace=trace: TraceChanged(seq, trace))  # type: ignore[misc]

    def _emit(self, change: Callable[[int], Change]) -> None:
        self._seq += 1
        data = msgspec.json.encode(change(self._seq))
        self._ring.append((self._seq, data))
        for queue in self._subscribers:
            try:
                queue.put_nowait((self._seq, "change", data))
            except asyncio.QueueFull:
                _put_last(queue)
        for listener in tuple(self._listeners):
            listener()


def _put_last(queue: "asyncio.Queue[Numbered | None]") -> None:
    """None as the newest item, whatever has to give way."""
    while True:
        try:
            queue.put_nowait(None)
        except asyncio.QueueFull:
            with contextlib.suppress(asyncio.QueueEmpty):
                queue.get_nowait()
        else:
            return

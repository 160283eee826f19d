"""The cluster as daemon and console both see it: typed, frozen, serialisable, and how events change it.

The daemon owns the only `ClusterState`; it sends a snapshot and then `Change`s over the control API.
A client applies them with `ClusterState.apply` and draws the result. Times ending in `_at` or named
`since` are Unix seconds; `_ms` and `_s` say their unit.
"""

import enum
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

import msgspec

from eccon_proxy.schema import EncoderInfo, PDInfo, Span, Trace

__all__ = [
    "Alarm",
    "Change",
    "ClusterChanged",
    "ClusterInfo",
    "ClusterState",
    "ConnectorCounts",
    "EngineFigures",
    "EventLogged",
    "Exit",
    "LogEvent",
    "Milestone",
    "Npu",
    "NpuContext",
    "Process",
    "ProcessChanged",
    "ProcessGone",
    "Quantiles",
    "Role",
    "Span",
    "State",
    "Trace",
    "TraceChanged",
    "Transfer",
]

TRACES_KEPT = 1000
EVENTS_KEPT = 1000

T = TypeVar("T")


def _upsert(rows: tuple[T, ...], row: T, key: Callable[[T], str]) -> tuple[T, ...]:
    """`rows` with `row` in the place of the one of the same key, or at the end."""
    wanted = key(row)
    for i in range(len(rows) - 1, -1, -1):
        if key(rows[i]) == wanted:
            return (*rows[:i], row, *rows[i + 1 :])
    return (*rows, row)


class Role(str, enum.Enum):
    """What a process is for."""

    PD = "pd"
    ENCODER = "encoder"
    PROXY = "proxy"


class State(str, enum.Enum):
    """Where a managed process is in its life; `Process.reason` says why."""

    STOPPED = "stopped"
    WAITING = "waiting"
    """Wanted, and waits for another (an encoder for its PD)."""
    STARTING = "starting"
    """Started; has not said anything yet."""
    LOADING = "loading"
    """Start-up milestones are being reached."""
    READY = "ready"
    STALLED = "stalled"
    """Alive, says 200, and makes no progress with what it holds."""
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    """Died; the next try is at `Process.retry_at`."""
    FAILED = "failed"
    """Died too often; an operator must start it."""
    BLOCKED = "blocked"
    """Its port or device is held by a stranger, or it cannot be killed."""


class Exit(msgspec.Struct, frozen=True):
    """How a process ended. Exactly one of `code` and `signal` is set, or neither: unknown."""

    at: float
    code: int | None = None
    signal: int | None = None
    asked: bool = False
    """Whether we had asked for it."""


class Milestone(msgspec.Struct, frozen=True):
    """A start-up step seen in the log."""

    text: str
    fraction: float
    """0 to 1, of the usual order of steps."""
    eta_s: float | None = None
    """Estimated from earlier starts; None when there were none."""


class Quantiles(msgspec.Struct, frozen=True):
    """Of `count` samples in the present window, in milliseconds."""

    count: int
    p50: float
    p99: float


class Transfer(msgspec.Struct, frozen=True):
    """Encoder to PD, from connector events. Headline figure: push + pull (`total`)."""

    total: Quantiles
    push: Quantiles
    wait: Quantiles
    pull: Quantiles


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a vLLM says of itself. Rates are since the reading before; None until there were two."""

    running: int
    waiting: int
    kv_use: float | None = None
    """0 to 1."""
    generated_per_s: float | None = None
    """Tokens."""
    prompt_per_s: float | None = None
    """Tokens."""
    ttft_ms: float | None = None
    """Mean time to the first token of the requests since the reading before."""


class ConnectorCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What the connector's log of one process told in this daemon's life, in items."""

    pushed: int = 0
    acked: int = 0
    evicted: int = 0
    """Thrown out before the PD took them, or by age."""
    received: int = 0
    completed: int = 0


class NpuContext(msgspec.Struct, frozen=True, kw_only=True):
    """A process that uses a device."""

    pid: int
    process: str = ""
    """Its title, as the tool shows it."""
    memory_bytes: int | None = None
    status: str = ""


class Npu(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator device, as the vendor's tool tells it. What it does not tell is None or empty."""

    device: str
    """Its node: "rbln3"; "cuda3" for a GPU."""
    index: int
    """Its number in the list of visible devices."""
    name: str = ""
    """Of the product: "RBLN-CA22"."""
    status: str = ""
    """"normal", or an alarm."""
    util_percent: float | None = None
    memory_used: int | None = None
    """Bytes."""
    memory_total: int | None = None
    """Bytes."""
    temperature_c: float | None = None
    power_w: float | None = None
    """Of the whole card, which several devices may share: those have the same `card`."""
    pstate: str = ""
    """P10: throttled by heat; P12: hangs; P14: idle (Rebellions)."""
    card: str = ""
    group: str = ""
    """Devices of one process must be of one group."""
    contexts: tuple[NpuContext, ...] = ()


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One managed process, with what the proxy and the connector say about it."""

    name: str
    role: Role
    state: State
    reason: str = ""
    since: float = 0.0
    wanted: bool = True
    """Whether the operator wants it up."""
    device: str = ""
    """Visible devices as shown: "8", "0-7" or "" for none."""
    port: int = 0
    url: str = ""
    pid: int | None = None
    started_at: float | None = None
    restarts: int = 0
    """Lives after its first one: of crashes and of commands, over `down` and `up` and over daemons."""
    retry_at: float | None = None
    exit: Exit | None = None
    """Of its last life."""
    last_lines: tuple[str, ...] = ()
    """Last log lines of a life that failed."""
    milestone: Milestone | None = None
    cpu_percent: float | None = None
    """Of one core, whole tree."""
    rss_bytes: int | None = None
    argv: tuple[str, ...] = ()
    """As shown: secrets masked."""
    encoder: EncoderInfo | None = None
    """What the proxy says of it; encoders only."""
    pd: PDInfo | None = None
    """What the proxy says of it; PD only."""
    transfer: Transfer | None = None
    """Of the items this encoder sent; None until the first."""
    engine: EngineFigures | None = None
    """From its own metrics; None while it has said none."""
    npus: tuple[Npu, ...] = ()
    """Its devices, in the order of their numbers; empty without the vendor's tool."""
    connector: ConnectorCounts | None = None
    guard: str = ""
    """Level of the guarded connector in force: "gate", "wrap", "hooks" or "vendor"; "off": the vendor's
    connector runs without it; empty: not told yet, or another connector."""
    milestones: tuple[tuple[str, float], ...] = ()
    """Steps of its start in their order, each with the seconds from its begin."""
    env: tuple[tuple[str, str], ...] = ()
    """What eccon sets of its environment, as shown: secrets masked."""
    external: bool = False
    """Started by others: watched and routed to, never signalled."""


class ClusterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster as a whole."""

    name: str
    model: str = ""
    public_url: str = ""
    config_path: str = ""
    state_dir: str = ""
    daemon_pid: int = 0
    daemon_started_at: float = 0.0
    wanted: bool = False
    """Whether `up` is in force."""
    health: Literal["ok", "degraded", "unavailable", "stopped", "starting"] = "stopped"
    reason: str = ""
    requests: int = 0
    inflight: int = 0
    queued: int = 0
    """Requests that wait in the proxy for room."""
    requests_per_s: float = 0.0
    items_per_s: float = 0.0
    ttft: Quantiles | None = None
    transfer: Transfer | None = None
    """Over all encoders."""
    transfer_source: Literal["log", "guard", "none"] = "none"
    lost_guard_events: int = 0
    """Events of guarded connectors that found no room in the socket."""
    """Where transfer times come from."""
    lost_log_lines: int = 0
    can_add: bool = True
    spare_npus: tuple[Npu, ...] = ()
    """Devices of the host that no process of the topology has."""
    npu_source: str = ""
    """The tool that device figures come from; empty when there is none, then `npu_note` says why."""
    npu_note: str = ""


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """Something an operator should look at. Identity is `key`; one that ended leaves the state."""

    key: str
    subject: str
    """Process name, or "cluster"."""
    text: str
    since: float
    severity: Literal["warning", "critical"] = "warning"
    help: str = ""
    """Name of the action that helps, e.g. "restart"."""
    due: float | None = None
    """When what is announced will happen, if nothing comes in between; Unix time."""


class LogEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the cluster's history."""

    at: float
    subject: str
    text: str
    severity: Literal["info", "warning", "error"] = "info"


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a console draws. `processes` is in display order; `traces` and `events` newest last."""

    seq: int = 0
    cluster: ClusterInfo
    processes: tuple[Process, ...] = ()
    traces: tuple[Trace, ...] = ()
    events: tuple[LogEvent, ...] = ()
    alarms: tuple[Alarm, ...] = ()

    def process(self, name: str) -> Process | None:
        """The process of that name, or None."""
        return next((p for p in self.processes if p.name == name), None)

    def apply(self, change: "Change") -> "ClusterState":
        """The state after `change`. A change that is not newer than the state leaves it as it is."""
        if change.seq <= self.seq:
            return self
        seq = change.seq
        match change:
            case ClusterChanged():
                return msgspec.structs.replace(self, seq=seq, cluster=change.cluster, alarms=change.alarms)
            case ProcessChanged():
                return msgspec.structs.replace(
                    self, seq=seq, processes=_upsert(self.processes, change.process, lambda p: p.name)
                )
            case ProcessGone():
                rest = tuple(p for p in self.processes if p.name != change.name)
                return msgspec.structs.replace(self, seq=seq, processes=rest)
            case TraceChanged():
                traces = _upsert(self.traces, change.trace, lambda t: t.id)
                return msgspec.structs.replace(self, seq=seq, traces=traces[-TRACES_KEPT:])
            case EventLogged():
                events = (*self.events, change.event)[-EVENTS_KEPT:]
                return msgspec.structs.replace(self, seq=seq, events=events)


class ClusterChanged(msgspec.Struct, frozen=True, tag="cluster"):
    """The cluster's own figures or its alarms."""

    seq: int
    cluster: ClusterInfo
    alarms: tuple[Alarm, ...] = ()


class ProcessChanged(msgspec.Struct, frozen=True, tag="process"):
    """A process is new or another than before."""

    seq: int
    process: Process


class ProcessGone(msgspec.Struct, frozen=True, tag="process_gone"):
    """A process left the topology."""

    seq: int
    name: str


class TraceChanged(msgspec.Struct, frozen=True, tag="trace"):
    """A request started, ended, or learnt of a transfer."""

    seq: int
    trace: Trace


class EventLogged(msgspec.Struct, frozen=True, tag="event"):
    """A line for the history."""

    seq: int
    event: LogEvent


Change: TypeAlias = ClusterChanged | ProcessChanged | ProcessGone | TraceChanged | EventLogged

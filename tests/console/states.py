"""Recorded, fixed states of a cluster, made by hand with every kind of row."""

import msgspec

from eccon.model import (
    Alarm,
    ClusterInfo,
    ClusterState,
    ConnectorCounts,
    Exit,
    LogEvent,
    Milestone,
    Npu,
    NpuContext,
    Process,
    Quantiles,
    Role,
    Span,
    State,
    Trace,
    Transfer,
)
from eccon_proxy.schema import EncoderInfo, PDInfo

__all__ = ["NOW", "busy", "degraded", "hostile", "many", "on_npus", "starting", "trace_of"]

NOW = 1_774_000_000.0


def transfer(p50: float, p99: float) -> Transfer:
    return Transfer(
        total=Quantiles(400, p50, p99),
        push=Quantiles(400, p50 * 0.4, p99 * 0.4),
        wait=Quantiles(400, 200.0, 380.0),
        pull=Quantiles(400, p50 * 0.6, p99 * 0.6),
    )


def encoder(i: int, **changes: object) -> Process:
    info = EncoderInfo(
        id=f"encoder-{i}",
        url=f"http://127.0.0.1:{19101 + i}",
        state="ready",
        inflight=i % 2,
        staged=(i + 1) % 2,
        items=1200 + 7 * i,
        encode_ms_p50=800.0 + i,
        encode_ms_p99=1400.0 + i,
    )
    process = Process(
        name=f"encoder-{i}",
        role=Role.ENCODER,
        state=State.READY,
        since=NOW - 7300,
        device=str(8 + i),
        port=19101 + i,
        url=f"http://127.0.0.1:{19101 + i}",
        pid=4200 + i,
        started_at=NOW - 7320,
        cpu_percent=39.0 + i,
        rss_bytes=6_650_000_000,
        argv=("vllm", "serve", "Qwen3-VL-8B-Instruct", "--port", str(19101 + i)),
        encoder=info,
        transfer=transfer(12.0, 31.0 + i),
    )
    return msgspec.structs.replace(process, **changes)


def trace_of(n: int, at: float, images: int = 3, **changes: object) -> Trace:
    spans: list[Span] = [Span(kind="queue", start=0.0, end=0.002)]
    for item in range(images):
        end = 0.8 + 0.05 * item
        uuid = f"u{n}-{item}"
        spans.append(
            Span(kind="encode", start=0.002, end=end, item=item, encoder=f"encoder-{item % 4}", uuid=uuid)
        )
        spans.append(
            Span(kind="push", start=end, end=end + 0.005, item=item, encoder=f"encoder-{item % 4}", uuid=uuid)
        )
        spans.append(Span(kind="wait", start=end + 0.005, end=1.2, item=item, uuid=uuid))
        spans.append(Span(kind="pull", start=1.2, end=1.207, item=item, uuid=uuid))
    gate_end = 0.8 + 0.05 * images
    if images:
        spans.append(Span(kind="gate", start=0.8, end=gate_end))
    spans.append(Span(kind="pd", start=gate_end, end=1.6))
    spans.append(Span(kind="stream", start=1.6, end=4.2))
    trace = Trace(
        id=f"req-{n:04x}",
        started_at=at,
        model="Qwen3-VL-8B-Instruct",
        status=200,
        outcome="ok",
        stream=True,
        items=images,
        spans=tuple(spans),
        ttft_s=1.6,
        total_s=4.2,
        prompt_tokens=1800,
        completion_tokens=214,
    )
    return msgspec.structs.replace(trace, **changes)


def busy(encoders: int = 4) -> ClusterState:
    """Everything is well and there is work."""
    pd = Process(
        name="pd",
        role=Role.PD,
        state=State.READY,
        since=NOW - 7380,
        device="0-7",
        port=19100,
        url="http://127.0.0.1:19100",
        pid=4100,
        started_at=NOW - 7400,
        cpu_percent=212.0,
        rss_bytes=40_900_000_000,
        argv=("vllm", "serve", "Qwen3-VL-8B-Instruct", "--port", "19100"),
        pd=PDInfo(url="http://127.0.0.1:19100", state="ready", epoch=NOW - 7400, inflight=6),
    )
    proxy = Process(
        name="proxy",
        role=Role.PROXY,
        state=State.READY,
        since=NOW - 7300,
        port=19000,
        url="http://127.0.0.1:19000",
        pid=4101,
        started_at=NOW - 7300,
        cpu_percent=14.0,
        rss_bytes=92_000_000,
    )
    traces = tuple(trace_of(n, NOW - 60 + n, images=n % 9) for n in range(40))
    retried = Trace(
        id="req-beef",
        started_at=NOW - 9.0,
        model="Qwen3-VL-8B-Instruct",
        status=200,
        outcome="ok",
        stream=True,
        items=2,
        spans=(
            Span(kind="queue", start=0.0, end=0.001),
            Span(kind="encode", start=0.001, end=0.82, item=0, encoder="encoder-0", uuid="a0"),
            Span(kind="push", start=0.82, end=0.826, item=0, encoder="encoder-0", uuid="a0"),
            Span(kind="wait", start=0.826, end=2.1, item=0, uuid="a0"),
            Span(kind="pull", start=2.1, end=2.106, item=0, uuid="a0"),
            Span(
                kind="encode", start=0.001, end=1.0, item=1, encoder="encoder-3", uuid="a1", outcome="timeout"
            ),
            Span(kind="encode", start=1.0, end=1.9, item=1, attempt=1, encoder="encoder-2", uuid="a2"),
            Span(kind="push", start=1.9, end=1.91, item=1, encoder="encoder-2", uuid="a2"),
            Span(kind="wait", start=1.91, end=2.1, item=1, uuid="a2"),
            Span(kind="pull", start=2.1, end=2.11, item=1, uuid="a2"),
            Span(kind="gate", start=0.82, end=1.92),
            Span(kind="pd", start=1.92, end=2.3),
            Span(kind="stream", start=2.3, end=6.41),
        ),
        ttft_s=2.3,
        total_s=6.41,
        completion_tokens=214,
    )
    left = Trace(
        id="req-7f39",
        started_at=NOW - 6.0,
        status=499,
        outcome="client_closed",
        items=1,
        spans=(Span(kind="encode", start=0.0, end=0.83, item=0, encoder="encoder-1", outcome="cancelled"),),
        total_s=0.83,
    )
    flying = Trace(
        id="req-7f40",
        started_at=NOW - 1.5,
        model="Qwen3-VL-8B-Instruct",
        stream=True,
        items=2,
        spans=(
            Span(kind="queue", start=0.0, end=0.0),
            Span(kind="encode", start=0.0, end=0.9, item=0, encoder="encoder-0", uuid="f0"),
            Span(kind="encode", start=0.0, item=1, encoder="encoder-1", uuid="f1"),
        ),
    )
    return ClusterState(
        seq=10,
        cluster=ClusterInfo(
            name="lab",
            model="Qwen3-VL-8B-Instruct",
            public_url="http://127.0.0.1:19000",
            config_path="/srv/eccon/eccon.toml",
            wanted=True,
            health="ok",
            requests=9600,
            inflight=6,
            requests_per_s=3.2,
            items_per_s=25.0,
            ttft=Quantiles(300, 820.0, 2400.0),
            transfer=transfer(12.0, 33.0),
            transfer_source="log",
        ),
        processes=(pd, proxy, *(encoder(i) for i in range(encoders))),
        traces=(*traces, retried, left, flying),
        events=(
            LogEvent(at=NOW - 7400, subject="pd", text="started (pid 4100)"),
            LogEvent(at=NOW - 7380, subject="pd", text="ready after 20 s"),
            LogEvent(
                at=NOW - 300, subject="encoder-3", text="ejected: two timeouts in a row", severity="warning"
            ),
            LogEvent(at=NOW - 290, subject="encoder-3", text="ready again"),
            LogEvent(at=NOW - 20, subject="cluster", text="reloaded the configuration"),
        ),
    )


def degraded() -> ClusterState:
    """One encoder holds its items, one loads, one died, one waits for its turn."""
    state = busy(6)
    processes = list(state.processes)
    stalled = processes[5]
    assert stalled.encoder is not None
    held = msgspec.structs.replace(stalled.encoder, inflight=4, staged=0, oldest_inflight_s=41.0)
    processes[5] = msgspec.structs.replace(
        stalled,
        state=State.STALLED,
        reason="has held 4 items for 41 s",
        cpu_percent=0.0,
        encoder=held,
        transfer=None,
    )
    processes[6] = msgspec.structs.replace(
        processes[6],
        state=State.LOADING,
        started_at=NOW - 31,
        since=NOW - 31,
        milestone=Milestone("loading weights", 0.62, 18.0),
        encoder=None,
        transfer=None,
    )
    processes[7] = msgspec.structs.replace(
        processes[7],
        state=State.BACKOFF,
        pid=None,
        started_at=None,
        restarts=3,
        retry_at=NOW + 8,
        exit=Exit(at=NOW - 4, signal=9),
        reason="killed by signal 9",
        last_lines=("(EngineCore pid=9) ERROR boom", "Traceback (most recent call last):"),
        encoder=None,
        transfer=None,
    )
    return msgspec.structs.replace(
        state,
        cluster=msgspec.structs.replace(state.cluster, health="degraded", reason="encoder-3 stalled"),
        processes=tuple(processes),
        alarms=(
            Alarm(
                key="stall:encoder-3",
                subject="encoder-3",
                text="has held 4 items for 41 s (its p99 is 1.4 s); health says 200",
                since=NOW - 41,
                help="restart",
            ),
            Alarm(
                key="crash:encoder-5",
                subject="encoder-5",
                text="died 3 times",
                since=NOW - 4,
                severity="critical",
                help="logs",
            ),
        ),
    )


def starting() -> ClusterState:
    """The cluster comes up: the PD loads, encoders wait for it."""
    state = busy(4)
    waiting = [
        msgspec.structs.replace(
            p,
            state=State.WAITING,
            reason="waits for pd",
            pid=None,
            started_at=None,
            encoder=None,
            transfer=None,
        )
        for p in state.processes[2:]
    ]
    pd = msgspec.structs.replace(
        state.processes[0],
        state=State.LOADING,
        started_at=NOW - 12,
        milestone=Milestone("compiling", 0.4, None),
        pd=None,
    )
    return msgspec.structs.replace(
        state,
        cluster=ClusterInfo(
            name="lab", model="Qwen3-VL-8B-Instruct", health="starting", reason="pd loads", wanted=True
        ),
        processes=(pd, state.processes[1], *waiting),
        traces=(),
        alarms=(),
    )


HOSTILE = (
    "[/]",
    "[/usr/bin/x]",
    "[bold red]x[/bold]",
    "EngineCore [b",
    "[@click=app.quit]x[/]",
    "[link=http://e]x",
    "한국어 설명 👩‍👩‍👧 ⚠️ \u200b end",
    "\x1b[31mred\x1b[0m \x1b]52;c;aGk=\x07 \x9b2J\r\n",
    "y" * 3000,
)


def hostile() -> ClusterState:
    """Markup, escape codes, wide and endless text in every place where text comes from outside."""
    state = degraded()
    processes = []
    for i, p in enumerate(state.processes):
        text = HOSTILE[i % len(HOSTILE)]
        processes.append(
            msgspec.structs.replace(
                p, reason=text, device=text, url=text, argv=(text, text), last_lines=HOSTILE
            )
        )
    traces = tuple(
        trace_of(n, NOW - n, id=f"id{n}{text}", error=text, model=text, status=500, outcome="upstream_error")
        for n, text in enumerate(HOSTILE)
    )
    events = tuple(
        LogEvent(at=NOW - n, subject=text, text=text, severity="error") for n, text in enumerate(HOSTILE)
    )
    alarms = tuple(Alarm(key=str(n), subject=text, text=text, since=NOW) for n, text in enumerate(HOSTILE))
    cluster = msgspec.structs.replace(
        state.cluster, name=HOSTILE[0], model=HOSTILE[6], public_url=HOSTILE[5], reason=HOSTILE[3]
    )
    return msgspec.structs.replace(
        state, cluster=cluster, processes=tuple(processes), traces=traces, events=events, alarms=alarms
    )


def many(encoders: int = 64, traces: int = 1000) -> ClusterState:
    """A large cluster with a long list of requests."""
    state = busy(encoders)
    return msgspec.structs.replace(
        state, traces=tuple(trace_of(n, NOW - traces + n, images=n % 9) for n in range(traces))
    )


def on_npus() -> ClusterState:
    """The busy cluster with the figures of its devices; one is throttled by heat."""
    state = busy(4)
    processes = []
    for p in state.processes:
        numbers = range(8) if p.role is Role.PD else [int(p.device)] if p.device.isdigit() else []
        npus = tuple(
            Npu(
                device=f"rbln{n}",
                index=n,
                name="RBLN-CA22",
                status="normal",
                util_percent=70.0 + n,
                memory_used=6_000_000_000,
                memory_total=16_877_879_296,
                temperature_c=50.0 + n,
                power_w=18.1,
                pstate="P10" if n == 9 else "P1",
                contexts=(NpuContext(pid=p.pid or 1, process="VLLM::EngineCore", memory_bytes=3 * 2**30),),
            )
            for n in numbers
        )
        processes.append(
            msgspec.structs.replace(
                p,
                npus=npus,
                connector=ConnectorCounts(pushed=1210, acked=1204, evicted=2, received=4800, completed=4790),
                milestones=(("imports", 4.2), ("loading weights", 9.0), ("ready", 31.5)),
                env=(("HF_HOME", "/data/hf"), ("VLLM_API_KEY", "•••")),
            )
        )
    cluster = msgspec.structs.replace(state.cluster, npu_source="rbln-smi", queued=3)
    return msgspec.structs.replace(state, processes=tuple(processes), cluster=cluster)

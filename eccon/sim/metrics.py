"""`/metrics`: vLLM's own families, those of them that mean something here, in Prometheus' text format."""

import os
import time
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from eccon.sim.ipc import Output, Stats

__all__ = ["Metrics"]

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
_LONG = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
_BETWEEN = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0)
_REASONS = ("stop", "length", "abort", "error", "repetition")


class _Writer(Protocol):
    def __call__(self, name: str, kind: str, help_: str, *values: tuple[str, float]) -> None: ...


class _Histogram:
    def __init__(self, name: str, help_: str, bounds: tuple[float, ...]) -> None:
        self.name, self.help, self.bounds = name, help_, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, labels: str) -> Iterable[str]:
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} histogram"
        so_far = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            so_far += count
            yield f'{self.name}_bucket{{{labels},le="{bound}"}} {so_far}.0'
        yield f"{self.name}_count{{{labels}}} {so_far}.0"
        yield f"{self.name}_sum{{{labels}}} {self.sum}"


class _Request:
    def __init__(self, at: float) -> None:
        self.began = self.last = at
        self.first: float | None = None
        self.tokens = 0


def _start_time() -> float:
    """Of this process, in Unix seconds: since boot from /proc, and when boot was."""
    ticks = int(
        Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    )
    boot = next(
        line
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()
        if line.startswith("btime")
    )
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


class Metrics:
    """Counts at the API server, where vLLM counts too; the engine's own figures are as of its last step."""

    def __init__(self, model_name: str) -> None:
        self._labels = f'engine="0",model_name="{model_name}"'
        self._made = time.time()
        self._epoch = _start_time()
        self._prompt = 0
        self._generated = 0
        self._ended = dict.fromkeys(_REASONS, 0)
        self._open: dict[str, _Request] = {}
        self._http: dict[tuple[str, str, str], int] = {}
        self._ttft = _Histogram(
            "vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", _SECONDS
        )
        self._itl = _Histogram(
            "vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _BETWEEN
        )
        self._e2e = _Histogram(
            "vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _LONG
        )
        self._prompts = _Histogram(
            "vllm:request_prompt_tokens", "Number of prefill tokens processed.", _TOKENS
        )
        self._answers = _Histogram(
            "vllm:request_generation_tokens", "Number of generation tokens processed.", _TOKENS
        )

    def arrived(self, request_id: str) -> None:
        """A request goes to the engine."""
        self._open[request_id] = _Request(time.monotonic())

    def step(self, outputs: list[Output]) -> None:
        """What a step of the engine gave."""
        now = time.monotonic()
        for output in outputs:
            request = self._open.get(output.id)
            if request is None:
                continue
            if request.first is None:
                request.first = now
                self._ttft.add(now - request.began)
                self._prompt += output.prompt_tokens
                self._prompts.add(output.prompt_tokens)
            else:
                self._itl.add(now - request.last)
            request.last = now
            self._generated += output.tokens > 0
            if output.finish_reason is not None:
                self._ended[output.finish_reason] += 1
                self._answers.add(output.tokens)
                self._e2e.add(now - request.began)

    def left(self, request_id: str, *, ended: bool) -> None:
        """The request is over, by itself or because its client went."""
        if self._open.pop(request_id, None) is not None and not ended:
            self._ended["abort"] += 1

    def http(self, handler: str, method: str, status: int) -> None:
        """An answer was given."""
        key = (handler, method, f"{status // 100}xx")
        self._http[key] = self._http.get(key, 0) + 1

    def text(self, stats: Stats, lookups: tuple[int, int]) -> bytes:
        """The exposition."""
        lines: list[str] = []

        def one(name: str, kind: str, help_: str, *values: tuple[str, float]) -> None:
            lines.extend((f"# HELP {name} {help_}", f"# TYPE {name} {kind}"))
            lines.extend(
                f"{name}{{{labels}}} {float(v)}" if labels else f"{name} {float(v)}" for labels, v in values
            )

        self._process(one)
        e = self._labels
        one(
            "vllm:num_requests_running",
            "gauge",
            "Number of requests in model execution batches.",
            (e, stats.running),
        )
        one(
            "vllm:num_requests_waiting",
            "gauge",
            "Number of requests waiting to be processed.",
            (e, stats.waiting),
        )
        waits = ((f'{e},reason="capacity"', stats.waiting), (f'{e},reason="deferred"', 0))
        one("vllm:num_requests_waiting_by_reason", "gauge", "Number of requests waiting, by reason.", *waits)
        one(
            "vllm:kv_cache_usage_perc",
            "gauge",
            "KV-cache usage. 1 means 100 percent usage.",
            (e, stats.kv_usage),
        )
        for name, value, help_ in (
            (
                "mm_cache_queries",
                lookups[0],
                "Multi-modal cache queries, in terms of number of queried items.",
            ),
            ("mm_cache_hits", lookups[1], "Multi-modal cache hits, in terms of number of cached items."),
            ("num_preemptions", 0, "Cumulative number of preemption from the engine."),
            ("prompt_tokens", self._prompt, "Number of prefill tokens processed."),
            ("generation_tokens", self._generated, "Number of generation tokens processed."),
        ):
            one(f"vllm:{name}_total", "counter", help_, (e, value))
            one(f"vllm:{name}_created", "gauge", help_, (e, self._made))
        ended = [(f'engine="0",finished_reason="{r}",{e[11:]}', n) for r, n in self._ended.items()]
        one("vllm:request_success_total", "counter", "Count of successfully processed requests.", *ended)
        for histogram in (self._prompts, self._answers, self._ttft, self._itl, self._e2e):
            lines.extend(histogram.lines(e))
        answered = [(f'handler="{h}",method="{m}",status="{s}"', n) for (h, m, s), n in self._http.items()]
        one(
            "http_requests_total",
            "counter",
            "Total number of requests by method, status and handler.",
            *answered,
        )
        return ("\n".join(lines) + "\n").encode()

    def _process(self, one: _Writer) -> None:
        pages = [int(n) for n in Path("/proc/self/statm").read_text(encoding="ascii").split()]
        size = os.sysconf("SC_PAGE_SIZE")
        cpu = sum(os.times()[:2])
        one("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", ("", pages[0] * size))
        one("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", ("", pages[1] * size))
        since = "Start time of the process since unix epoch in seconds."
        one("process_start_time_seconds", "gauge", since, ("", self._epoch))
        one(
            "process_cpu_seconds_total",
            "counter",
            "Total user and system CPU time spent in seconds.",
            ("", cpu),
        )
        fds = len(list(Path("/proc/self/fd").iterdir()))
        one("process_open_fds", "gauge", "Number of open file descriptors.", ("", fds))

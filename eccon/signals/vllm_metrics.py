"""What a vLLM says at `/metrics`, as figures: gauges as they are, counters as rates between two readings.

Names are those of vLLM 0.30; the older name of the KV gauge is known too.
"""

import re
import time
from collections.abc import Mapping

from eccon.model import EngineFigures

__all__ = ["EngineMetrics", "read"]

WANTED = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "generation_tokens_total",
    "prompt_tokens_total",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
)
LINE = re.compile(rf"^vllm:({'|'.join(WANTED)})(?:\{{[^\n]*\}})? ([^ \n]+)", re.MULTILINE)


def read(text: str) -> dict[str, float]:
    """The wanted samples, summed over their labels (engines, models)."""
    found: dict[str, float] = {}
    for name, value in LINE.findall(text):
        try:
            found[name] = found.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return found


class EngineMetrics:
    """Of one process. Readings of another life begin afresh: its counters start at nothing."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}
        self._at = 0.0
        self._life = ""

    def take(self, life: str, text: str, now: float | None = None) -> EngineFigures | None:
        """Figures from one reading; None when there is nothing of vLLM in it."""
        now = time.monotonic() if now is None else now
        found = read(text)
        if not found:
            return None
        before = self._before if life == self._life else {}
        elapsed = now - self._at
        self._before, self._at, self._life = found, now, life

        def grown(name: str) -> float | None:
            if name not in before or name not in found or found[name] < before[name]:
                return None
            return found[name] - before[name]

        def rate(name: str) -> float | None:
            more = grown(name)
            return None if more is None or elapsed <= 0 else round(more / elapsed, 1)

        first_tokens = grown("time_to_first_token_seconds_count")
        waited = grown("time_to_first_token_seconds_sum")
        kv = found.get("kv_cache_usage_perc", found.get("gpu_cache_usage_perc"))
        return EngineFigures(
            running=round(found.get("num_requests_running", 0)),
            waiting=round(found.get("num_requests_waiting", 0)),
            kv_use=None if kv is None else round(kv, 3),
            generated_per_s=rate("generation_tokens_total"),
            prompt_per_s=rate("prompt_tokens_total"),
            ttft_ms=round(1000 * waited / first_tokens, 1) if waited is not None and first_tokens else None,
        )

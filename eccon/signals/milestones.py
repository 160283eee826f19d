"""How far a starting process is, by the lines that vLLM logs, and how long it will still take.

The texts are those of vLLM 0.30; the fractions are of the usual order of steps, not of time.
"""

import re
import statistics
from collections.abc import Iterator

import msgspec

__all__ = ["READY", "History", "Step", "steps"]

READY = "ready"
KEPT = 5
"""Starts that an estimate is made of."""


class Step(msgspec.Struct, frozen=True):
    """A step of the start that a log line shows."""

    text: str
    fraction: float


STEPS: tuple[tuple[bytes, str, float], ...] = (
    (rb"vLLM API server version|non-default args", "starting vLLM", 0.05),
    (rb"Resolved architecture", "reading the model's configuration", 0.10),
    (rb"Initializing a V\d LLM engine", "starting the engine", 0.20),
    (rb"(?:PULL bound on|PUSH connected to)", "connecting encoders and PD", 0.30),
    (rb"Starting to load model", "loading the model", 0.35),
    (rb"checkpoint shards:\s+(\d+)% Completed", "loading weights", 0.40),
    (rb"Loading weights took", "weights loaded", 0.60),
    (rb"Model loading took", "model loaded", 0.65),
    (rb"torch\.compile takes|Compiling", "compiling", 0.70),
    (rb"KV cache (?:size|memory)", "sizing the KV cache", 0.75),
    (rb"[Ww]arm(?:ing)?[ -]?up(?! model\))", "warming up", 0.80),
    (rb"init engine \(", "engine initialised", 0.85),
    (rb"Starting vLLM (?:API )?server", "opening the API", 0.90),
    (rb"Application startup complete", "API is up", 0.97),
)
WORDS = (
    *(
        b"vLLM",
        b"non-default args",
        b"Resolved architecture",
        b"LLM engine",
        b"PULL bound",
        b"PUSH connected",
    ),
    *(b"load model", b"checkpoint shards", b"weights took", b"loading took", b"torch.compile", b"Compiling"),
    *(b"KV cache", b"arm", b"init engine", b"startup complete"),
)
"""Every line that shows a step has one of them: a search for plain words is many times faster."""
ANY = re.compile(b"|".join(b"(?P<s%d>%b)" % (i, pattern) for i, (pattern, _, _) in enumerate(STEPS)))


def steps(lines: bytes) -> Iterator[Step]:
    """Steps that `lines` show, in their order."""
    if not any(word in lines for word in WORDS):
        return
    for found in ANY.finditer(lines):
        number = int((found.lastgroup or "s0")[1:])
        _, text, fraction = STEPS[number]
        if text == "loading weights":
            shard = next((g for g in found.groups() if g and g.isdigit()), b"0")
            fraction += 0.19 * min(int(shard), 100) / 100
        yield Step(text, fraction)


class History(msgspec.Struct):
    """When the steps of earlier starts were reached, in seconds after their begin, by role. Persisted."""

    starts: dict[str, list[dict[str, float]]] = {}

    def add(self, role: str, reached: dict[str, float], ready_after: float) -> None:
        """One start that became ready."""
        rows = self.starts.setdefault(role, [])
        rows.append({**reached, READY: ready_after})
        del rows[:-KEPT]

    def remaining(self, role: str, step: str | None, since_step: float) -> float | None:
        """Seconds until ready, `since_step` seconds after `step` (None: after the begin). None: unknown."""
        rows = self.starts.get(role, [])
        left = [r[READY] - (r[step] if step else 0.0) for r in rows if step is None or step in r]
        return max(0.0, statistics.median(left) - since_step) if left else None

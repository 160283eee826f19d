"""The guarded connector beside the vendor's on real vLLM: the same answers, and what they cost.

    ECCON_LAB=DIR python -m benchmarks.guard [OUT.json]

Two PDs and two encoders, one pair of each kind, asked in turn within the same seconds, so that whatever else
the host does meets both. Twenty requests of four images each: each image is encoded, then the PD is asked
with log-probabilities. Fails unless these are equal; prints a table.
"""

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.connector.guarded import GuardedLab
from tests.contract.client import ask, fresh, image, part, png, text
from tests.contract.target import LabTarget, Server, free_port, until

REQUESTS, IMAGES = 20, 4
KINDS = {"vendor's": LabTarget, "guarded": GuardedLab}
STEPS = {
    "encode": "encoding one image",
    "pd": "PD, four images, eight tokens",
    "whole": "both, one image after another",
    "text": "PD, a text of one token",
}


class Pair:
    """A PD and an encoder of one kind, and seconds of every step."""

    def __init__(self, lab: LabTarget) -> None:
        port = free_port()
        self.lab = lab
        self.pd, self.encoder = lab.pd(port), lab.encoder(port)
        self.seconds: dict[str, list[float]] = {step: [] for step in STEPS}
        self.answers: list[Any] = []

    def warm_up(self) -> None:
        """Wait until items come through; the first ones make connections."""

        def linked() -> bool:
            uuid = fresh()
            ask(self.encoder, [part(uuid)], max_tokens=1)
            return bool(self.pd.events(f"received metadata for mm_hash={uuid}"))

        until(linked, 60, "the first item does not arrive")
        for _ in range(3):
            uuid = fresh()
            ask(self.encoder, [part(uuid)], max_tokens=1)
            ask(self.pd, [part(uuid), text()])

    def request(self, n: int) -> None:
        """One of the twenty."""
        parts = []
        whole = 0.0
        for i in range(IMAGES):
            picture = png(96 + 32 * (n % 5), 64 + 32 * i, (n * 12, i * 60, (n * i * 7) % 256))
            parts.append(part(f"item-{n}-{i}", image(picture)))
            whole += self._took("encode", self.encoder, [parts[-1]], max_tokens=1)[1]
        answer, seconds = self._took("pd", self.pd, [*parts, text()], logprobs=True, top_logprobs=5)
        self.seconds["whole"].append(whole + seconds)
        self.answers.append(answer.answer())
        self._took("text", self.pd, "hello", max_tokens=1)

    def _took(self, step: str, server: Server, content: object, **more: Any) -> tuple[Any, float]:
        reply = ask(server, content, **more)
        self.seconds[step].append(reply.seconds)
        return reply, reply.seconds


def run(directory: Path) -> dict[str, Pair]:
    """Both kinds in turn, each first in every other round."""
    with ExitStack() as stack:
        pairs = {}
        for kind, make in KINDS.items():
            (directory / kind).mkdir()
            lab = make(directory / kind)
            stack.callback(lab.close)
            pairs[kind] = Pair(lab)
        for pair in pairs.values():
            stack.enter_context(pair.lab.lent(pair.pd, pair.encoder))
            pair.warm_up()
        for n in range(REQUESTS):
            for pair in list(pairs.values())[:: 1 if n % 2 else -1]:
                pair.request(n)
    return pairs


def table(pairs: dict[str, Pair]) -> str:
    """In Markdown; raises when an answer differs."""
    vendors, guarded = pairs.values()
    same = sum(a == b for a, b in zip(vendors.answers, guarded.answers, strict=True))
    if same != REQUESTS:
        raise SystemExit(f"only {same} of {REQUESTS} answers have equal log-probabilities")
    lines = [
        f"| median (middle half), ms | {' | '.join(pairs)} | median difference |",
        "|---|---|---|---|",
    ]
    for step, name in STEPS.items():
        cells = []
        for pair in pairs.values():
            low, middle, high = (1e3 * q for q in quantiles(pair.seconds[step], n=4))
            cells.append(f"{middle:.0f} ({low:.0f} … {high:.0f})")
        both = zip(vendors.seconds[step], guarded.seconds[step], strict=True)
        cells.append(f"{1e3 * median(b - a for a, b in both):+.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    load = os.getloadavg()[0]
    lines.append(f"\n{same} of {same} answers have equal log-probabilities; load {load:.1f} at the end.")
    return "\n".join(lines)


def main() -> None:
    """See above."""
    with tempfile.TemporaryDirectory() as directory:
        pairs = run(Path(directory))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({k: p.seconds for k, p in pairs.items()}))
    print(table(pairs))


if __name__ == "__main__":
    main()

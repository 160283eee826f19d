"""The guarded connector beside the vendor's on real vLLM: the same answers, and what they cost.

    ECCON_LAB=DIR python -m benchmarks.guard vendor OUT.json
    ECCON_LAB=DIR python -m benchmarks.guard guarded OUT.json
    python -m benchmarks.guard compare VENDOR.json GUARDED.json

One PD and one encoder. Twenty requests of four images each, the same in every run: each image is encoded,
then the PD is asked with log-probabilities. `compare` fails unless these are equal, and prints a table.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tests.connector.guarded import GuardedLab
from tests.contract.client import ask, fresh, image, part, png, text
from tests.contract.target import LabTarget, free_port, until

REQUESTS, IMAGES = 20, 4


def run(lab: LabTarget) -> dict[str, Any]:
    """Seconds of every step, and what was answered."""
    port = free_port()
    pd, encoder = lab.pd(port), lab.encoder(port)
    rows: dict[str, Any] = {"encode": [], "pd": [], "text": [], "answers": []}
    with lab.lent(pd, encoder):

        def linked() -> bool:
            uuid = fresh()
            ask(encoder, [part(uuid)], max_tokens=1)
            return bool(pd.events(f"received metadata for mm_hash={uuid}"))

        until(linked, 60, "the first item does not arrive")
        for uuid in (fresh(), fresh(), fresh()):
            ask(encoder, [part(uuid)], max_tokens=1)
            ask(pd, [part(uuid), text()])
        for n in range(REQUESTS):
            parts = []
            for i in range(IMAGES):
                picture = png(96 + 32 * (n % 5), 64 + 32 * i, (n * 12, i * 60, (n * i * 7) % 256))
                parts.append(part(f"item-{n}-{i}", image(picture)))
                rows["encode"].append(ask(encoder, [parts[-1]], max_tokens=1).seconds)
            reply = ask(pd, [*parts, text()], logprobs=True, top_logprobs=5)
            rows["pd"].append(reply.seconds)
            rows["answers"].append(reply.answer())
            rows["text"].append(ask(pd, "hello", max_tokens=1).seconds)
    return rows


def compare(vendor: dict[str, Any], guarded: dict[str, Any]) -> str:
    """A table in Markdown; raises when an answer differs."""
    same = sum(a == b for a, b in zip(vendor["answers"], guarded["answers"], strict=True))
    if same != len(vendor["answers"]):
        msg = f"only {same} of {len(vendor['answers'])} answers have equal log-probabilities"
        raise SystemExit(msg)
    lines = ["| median (longest), ms | vendor's | guarded |", "|---|---|---|"]
    for key, name in (
        ("encode", "encoding one image"),
        ("pd", "PD, four images, eight tokens"),
        ("text", "PD, a text of one token"),
    ):
        cells = [f"{median(r[key]) * 1e3:.0f} ({max(r[key]) * 1e3:.0f})" for r in (vendor, guarded)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(f"\n{same} of {same} answers have equal log-probabilities.")
    return "\n".join(lines)


def main() -> None:
    """See above."""
    match sys.argv[1:]:
        case ["compare", vendor, guarded]:
            print(compare(json.loads(Path(vendor).read_text()), json.loads(Path(guarded).read_text())))
        case [("vendor" | "guarded") as which, out]:
            with tempfile.TemporaryDirectory() as directory:
                lab = (GuardedLab if which == "guarded" else LabTarget)(Path(directory))
                try:
                    Path(out).write_text(json.dumps(run(lab)))
                finally:
                    lab.close()
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()

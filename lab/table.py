"""Runs the fault list and makes a table of it.

    python -m lab.table run --front guide --guide GUIDE.md --out guide.json
    python -m lab.table run --front eccon --out eccon.json
    python -m lab.table run --front guarded --out guarded.json
    python -m lab.table show by-hand.json guide.json eccon.json guarded.json
    python -m lab.table show --into README.md by-hand.json guide.json eccon.json guarded.json

A run starts real vLLM (the lab in ECCON_LAB), a PD and two encoders, and takes about a minute a fault. What
is in the output file already is not run again. With --stand-in it is seconds, and no lab but for the guide's
proxy, whose imports the lab has.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.faults import FAULTS, Fault
from lab.fronts import ByHand, Eccon, Front, Guide
from lab.world import Outcome, World
from tests.connector.guarded import GuardedLab, GuardedSim
from tests.contract.target import LabTarget, SimTarget, Target

STALL_S = 20.0
"""From here on somebody else's one-token request has been stalled. It takes 0.06 s on an idle machine; a PD
that misses an item holds it for 30 s."""
HANG_S = 5.0
"""From here on an encoder has hung; its own one-token request takes 0.02 s."""
LABS: dict[str, type[Target]] = {"": LabTarget, "guarded": GuardedLab}
STAND_INS: dict[str, type[Target]] = {"": SimTarget, "guarded": GuardedSim}
"""By front."""
BEGIN, END = "<!-- faults -->", "<!-- /faults -->"
TITLES = {
    "by hand": "no proxy",
    "guide": "the guide's proxy",
    "eccon": "eccon-proxy",
    "guarded": "eccon-proxy, guarded connector",
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.table", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run", help="try faults behind one front")
    run.add_argument("--front", choices=sorted(TITLES), required=True)
    run.add_argument("--stand-in", action="store_true", help="with the stand-in in vLLM's place")
    run.add_argument("--guide", type=Path, help="a copy of the guide, for --front guide")
    run.add_argument("--out", type=Path, required=True, help="JSON, added to")
    run.add_argument(
        "--fault", action="append", choices=[f.name for f in FAULTS], help="only these, in this order"
    )
    run.add_argument("--seconds", type=float, default=3600.0, help="begin no fault after so long")
    show = commands.add_parser("show", help="print the table")
    show.add_argument("--into", type=Path, help="write it there instead, between two marks")
    show.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "show":
        if given.into is None:
            print(table(given.files))
        else:
            text = put(given.into.read_text("utf-8"), table(given.files))
            given.into.write_text(text, "utf-8")
        return
    if given.front == "guide" and given.guide is None:
        parser.error("--front guide needs --guide")
    named = {f.name: f for f in FAULTS}
    chosen = [named[name] for name in given.fault or named]
    targets = STAND_INS if given.stand_in else LABS
    target = targets.get(given.front, targets[""])
    measure(given.front, target, given.guide, given.out, chosen, given.seconds)


def measure(
    name: str,
    kind: type[Target],
    guide: Path | None,
    out: Path,
    faults: Sequence[Fault],
    seconds: float,
) -> None:
    """Every fault that is not in `out` yet, written there one by one."""
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"front": name, "faults": {}}
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="eccon-faults-") as directory:
        target = kind(Path(directory))
        results["stand_in"] = issubclass(kind, SimTarget)
        results["connector"] = target.connector()["ec_connector"]
        world = World(target, _front(name, guide, target.directory))
        try:
            for fault in faults:
                if fault.name in results["faults"] or time.monotonic() > end:
                    continue
                world.prepare(fault.room)
                fault.act(world)
                outcome = world.conclude()
                results["faults"][fault.name] = asdict(outcome)
                out.write_text(json.dumps(results, indent=1))
                print(f"{name}: {fault.name}: {cell(outcome)}", flush=True)
        finally:
            world.close()
            target.close()


def _front(name: str, guide: Path | None, directory: Path) -> Front:
    if name == "guide":
        assert guide is not None
        return Guide(directory, guide)
    return ByHand() if name == "by hand" else Eccon(directory)


def table(files: Sequence[Path]) -> str:
    """Markdown: a row a fault, a column a file; – for what was not run."""
    columns = [json.loads(f.read_text()) for f in files]
    titles = [TITLES[c["front"]] for c in columns]
    lines = ["| | " + " | ".join(titles) + " |", "|---" * (len(columns) + 1) + "|"]
    for fault in FAULTS:
        cells = [c["faults"].get(fault.name) for c in columns]
        if any(cells):
            shown = [cell(Outcome(**c)) if c else "–" for c in cells]
            lines.append(f"| {fault.what} | " + " | ".join(shown) + " |")
    deaths = [sum(f["pd_died"] for f in c["faults"].values()) for c in columns]
    stalls = [sum(_stalled(Outcome(**f)) for f in c["faults"].values()) for c in columns]
    wrong = [sum(f["wrong"] for f in c["faults"].values()) for c in columns]
    tried = [len(c["faults"]) for c in columns]
    for title, counts in (("PD deaths", deaths), ("stalls of others", stalls)):
        if counts is stalls and any(c.get("stand_in") for c in columns):
            continue  # its times are not vLLM's
        pairs = zip(counts, tried, strict=True)
        lines.append(f"| **{title}** | " + " | ".join(f"**{n}** of {all_}" for n, all_ in pairs) + " |")
    lines.append("| **wrong answers** | " + " | ".join(f"**{n}**" for n in wrong) + " |")
    loads = [sorted(f["load"] for f in c["faults"].values() if f.get("load") is not None) for c in columns]
    if any(loads):
        middle = (f"{x[len(x) // 2]:.0f} ({x[0]:.0f} to {x[-1]:.0f})" if x else "" for x in loads)
        lines.append("| load of the machine where noted, median (range) | " + " | ".join(middle) + " |")
    return "\n".join(lines)


def put(text: str, lines: str) -> str:
    """A text with the table in place of the one that it has between these marks.

    Raises:
        ValueError: it has no place for one.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        msg = f"no {BEGIN} and {END}"
        raise ValueError(msg)
    return f"{before}{begin}\n{lines}\n{end}{after}"


def _stalled(o: Outcome) -> bool:
    return o.innocent_s >= STALL_S


def cell(o: Outcome) -> str:
    """What happened, worst first."""
    said = []
    if o.pd_died:
        said.append("**PD dies**")
    if _stalled(o):
        said.append(f"all stall {o.innocent_s:.0f} s")
    if o.encoder_s >= HANG_S:
        said.append(f"encoders hang {o.encoder_s:.0f} s")
    if o.wrong:
        said.append(f"**{o.wrong} wrong**")
    total = o.answered + o.wrong + o.refused + o.failed
    if o.failed:
        late = f" after {o.waited_s:.0f} s" if o.waited_s >= STALL_S > o.innocent_s else ""
        said.append(f"{o.failed} of {total} failed{late}")
    if o.refused:
        said.append(f"{o.refused} of {total} refused")
    if o.answered:
        said.append("answered" if o.answered == total else f"{o.answered} of {total} answered")
    return ", ".join(said)


if __name__ == "__main__":
    main()

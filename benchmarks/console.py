"""What the console costs and how quick it is, on a pseudo-terminal: `python benchmarks/console.py [--quick]`.

Prints, with the terminal's size: the time to the first paint, to the first state, and to the answer of a
key that was pressed at that moment, with the CPU that the first paint took; bytes a second to the terminal
and CPU of the console's process, idle and with eight busy encoders whose figures change each second (and in
low-bandwidth mode); how soon a key is answered with 64 encoders and 10,000 requests; and how the memory of
a replay grows over an hour of recording. The daemon is a small stand-in that sends made-up states. Times and
CPU want a quiet machine; how much others load it is printed too.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from eccon.model import Change, ClusterChanged, ClusterState, ProcessChanged, TraceChanged
from eccon.recording import Recorder
from tests.console import states
from tests.console.fake_daemon import FakeDaemon, running
from tests.console.terminal import Terminal, open_console

ATTACH = """
import sys
sys.argv = ["eccon", "attach", "--socket", sys.argv[1]]
from eccon.cli import main
main()
"""
REPLAY = """
import sys
from pathlib import Path
from eccon import console
from eccon.console.replay import Replay
sys.exit(console.run(Path("x"), on_quit_ask=False, read_only=True,
                     source=lambda: Replay(Path(sys.argv[2]), float(sys.argv[3]))))
"""


SIZES = ((80, 24), (160, 45), (200, 60))


def now_of(state: ClusterState) -> ClusterState:
    """The state with its times moved to the present; calm: nothing in flight."""
    by = time.time() - states.NOW

    def later(at: float | None) -> float | None:
        return None if at is None else at + by

    processes = tuple(
        msgspec.structs.replace(p, since=p.since + by, started_at=later(p.started_at))
        for p in state.processes
    )
    traces = tuple(
        msgspec.structs.replace(t, started_at=t.started_at + by - 3600) for t in state.traces if t.status
    )
    cluster = msgspec.structs.replace(state.cluster, requests_per_s=0.0, items_per_s=0.0, inflight=0)
    return msgspec.structs.replace(state, processes=processes, traces=traces, cluster=cluster)


def changes(state: ClusterState, second: int, at: float) -> Iterator[Change]:
    """One busy second: every encoder's figures, the cluster's, and four requests."""
    seq = state.seq + 1 + second * 100
    for n, p in enumerate(state.processes):
        if p.encoder is None:
            continue
        info = msgspec.structs.replace(
            p.encoder,
            items=p.encoder.items + 3 * second + n,
            inflight=(second + n) % 3,
            staged=(second + 2 * n) % 4,
            encode_ms_p50=800.0 + (second * 7 + n) % 60,
        )
        yield ProcessChanged(
            seq + n,
            msgspec.structs.replace(p, encoder=info, cpu_percent=30.0 + (second * 11 + n * 5) % 40),
        )
    cluster = msgspec.structs.replace(
        state.cluster,
        requests_per_s=3.0 + second % 5 / 10,
        items_per_s=24.0 + second % 7,
        inflight=4 + second % 4,
        requests=9600 + 4 * second,
    )
    yield ClusterChanged(seq + 50, cluster)
    for n in range(4):
        yield TraceChanged(seq + 60 + n, states.trace_of(100_000 + second * 4 + n, at - 2, images=n * 2))


def say(what: str, size: tuple[int, int] | str, figures: str) -> None:
    """One line of the report."""
    where = size if isinstance(size, str) else f"{size[0]}x{size[1]}"
    sys.stdout.write(f"{what:<34} {where:>8}  {figures}\n")
    sys.stdout.flush()


class Meter:
    """Bytes to the terminal and CPU of the console over a stretch."""

    def __init__(self, t: Terminal) -> None:
        self.t = t
        self.process = psutil.Process(t.process.pid)
        self.began, self.bytes, self.cpu = time.monotonic(), len(t.output), self._cpu()

    def _cpu(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def figures(self) -> str:
        """Since the beginning."""
        took = time.monotonic() - self.began
        sent = len(self.t.output) - self.bytes
        return f"{sent / took:8.0f} B/s   {(self._cpu() - self.cpu) / took:6.2%} of a core"


def read_for(t: Terminal, seconds: float) -> None:
    """Reads what the console writes for so long."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        t.read(min(left, 0.5))


@contextlib.contextmanager
def busy(fake: FakeDaemon) -> Iterator[None]:
    """Sends a busy second each second, from a thread of its own."""
    over = threading.Event()
    base = fake.state

    def run() -> None:
        second = 0
        while not over.wait(1.0):
            second += 1
            for change in changes(base, second, time.time()):
                fake.change(change)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def first_paint(size: tuple[int, int], times: int) -> None:
    """From the start of `eccon attach` to the first cell, the first process, and the answer to a key."""
    painted, stated, answered, spent = [], [], [], []
    with running(now_of(states.busy(8))) as fake:
        for _ in range(times):
            began = time.monotonic()
            with open_console(fake.socket, size=size, main=ATTACH) as t:
                t.until("eccon")
                painted.append(time.monotonic() - began)
                times_of = psutil.Process(t.process.pid).cpu_times()
                spent.append(times_of.user + times_of.system)
                t.until("encoder-0")
                stated.append(time.monotonic() - began)
                t.press("c")
                t.until("Charts")
                answered.append(time.monotonic() - began)
    say(
        "first paint / state / key answered",
        size,
        " / ".join(f"{statistics.median(a):.2f}" for a in (painted, stated, answered))
        + f" s at the median of {times}, best "
        + " / ".join(f"{min(a):.2f}" for a in (painted, stated, answered))
        + f"; CPU until painted {statistics.median(spent):.2f} s",
    )


def costs(size: tuple[int, int], seconds: float) -> None:
    """Idle, and with eight busy encoders."""
    for what, env in (("", {}), ("low bandwidth, ", {"ECCON_LOW_BANDWIDTH": "1"})):
        with running(now_of(states.busy(8))) as fake, open_console(fake.socket, size=size, env=env) as t:
            t.until("encoder-0")
            read_for(t, 3.0)
            if not what:
                meter = Meter(t)
                read_for(t, seconds)
                say("idle", size, meter.figures())
            with busy(fake):
                read_for(t, 3.0)
                meter = Meter(t)
                read_for(t, seconds)
                say(f"{what}8 busy encoders at 1 Hz", size, meter.figures())


def keys(size: tuple[int, int], times: int) -> None:
    """From a key to the first byte of its answer, in a console that has come up."""
    state = now_of(states.many(64, 10_000))
    with running(state) as fake, open_console(fake.socket, size=size) as t:
        t.until("encoder-0", 60)
        t.press("j")
        while not t.read(1.0):
            pass
        read_for(t, 3.0)
        for screen, opening in (("overview", ""), ("traces", "t")):
            if opening:
                t.press(opening)
                t.until("10000 of 10000", 30)
            t.settle()
            took = []
            for n in range(times):
                began = time.monotonic()
                t.press("j" if n % 20 < 12 else "k")
                while not t.read(1.0):
                    pass
                took.append((time.monotonic() - began) * 1000)
                t.settle(0.05, 1)
            took.sort()
            say(
                f"key, 64 encoders, 10,000 traces: {screen}"[:34],
                size,
                f"median {statistics.median(took):.0f} ms   p90 {took[int(times * 0.9)]:.0f} ms   "
                f"worst {took[-1]:.0f} ms",
            )


def memory(size: tuple[int, int], minutes: int, speed: float) -> None:
    """Replays a made-up recording."""
    with tempfile.TemporaryDirectory(prefix="ec") as directory:
        path = Path(directory) / "recording"
        began = time.time() - 60 * minutes
        state = now_of(states.busy(8))
        with Recorder(path) as recorder:
            recorder.take(state, began)
            for second in range(60 * minutes):
                for change in changes(state, second, began + second):
                    recorder.take(change, began + second)
        with open_console(path, str(path), str(speed), size=size, main=REPLAY) as t:
            t.until("encoder-0", 30)
            process = psutil.Process(t.process.pid)
            seen = []
            while "replay ended" not in t.text:
                read_for(t, 60 * minutes / speed / 12)
                seen.append(process.memory_info().rss / 2**20)
                if len(seen) > 200:
                    break
            at = " ".join(f"{mib:.0f}" for mib in seen[:: max(1, len(seen) // 8)])
            say(f"replay of {minutes} min at x{speed:g}", size, f"MiB over it: {at}")


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute instead of six")
    quick = parser.parse_args().quick
    say("load of the machine", "", " ".join(f"{n:.1f}" for n in os.getloadavg()))
    for size in SIZES[:2]:
        first_paint(size, 3 if quick else 10)
    for size in SIZES:
        costs(size, 8.0 if quick else 60.0)
    for size in SIZES[:2]:
        keys(size, 20 if quick else 60)
    memory((160, 45), 10 if quick else 60, 240.0 if quick else 60.0)


if __name__ == "__main__":
    main()

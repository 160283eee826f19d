"""What grows and what does not: CPU with the number of encoders, memory with bodies, bursts and time.

    python benchmarks/limits.py [encoders] [memory] [soak] [streams]

- encoders: CPU milliseconds a request with 4, 16, 64 and 256 encoders (all in one upstream process).
- memory: peak resident memory of one 8 × 1 MB request over the idle proxy, as a multiple of its body;
  and what is left of a burst of 160 MB of bodies.
- soak: resident memory every 10,000 of 50,000 requests.
- streams: 1,000 at the same time.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import load
import psutil
from proxies import ECCON, HERE, bodies, cpu_s, rss_mib, started, wait_until_served

FIRST = 24000  # below the ephemeral ports, which our own connections use up


@contextmanager
def proxy(encoders: int, *upstream: str, options: str = "") -> Iterator[tuple[int, int]]:
    """Port and pid of an eccon-proxy before an upstream of our own."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        command = " ".join(
            [sys.executable, str(HERE / "upstream.py"), str(FIRST), str(encoders + 1), *upstream]
        )
        stack.enter_context(started(command, folder / "upstream.log"))
        pd, *urls = [f"http://127.0.0.1:{p}" for p in range(FIRST, FIRST + encoders + 1)]
        port = FIRST + encoders + 1
        argv = ECCON.format(port=port, encoders=",".join(urls), pd=pd, folder=folder) + f" {options}"
        child = stack.enter_context(started(argv, folder / "proxy.log"))
        wait_until_served(port, bodies()["text"], folder / "proxy.log")
        wait_until_served(port, bodies()["url8"], folder / "proxy.log")
        yield port, child.pid


def encoders() -> None:
    """Cost per request against the number of encoders."""
    base = 0.0
    body = bodies()["url8"]
    for count in (4, 16, 64, 256):
        with proxy(count) as (port, pid):
            runs = []
            for _ in range(3):
                before = cpu_s(pid)
                result = asyncio.run(load.drive(port, body, connections=8, requests=1500))
                runs.append(1000 * (cpu_s(pid) - before) / len(result.latencies))
                assert result.bad == 0
            cpu = statistics.median(runs)
            base = base or cpu
            print(f"encoders {count:4}  url8 cpu {cpu:6.3f} ms/req  x{cpu / base:5.2f}", flush=True)


def peak_mib(pid: int) -> float:
    """Highest resident memory since the last `forget_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(line)


def forget_peak(pid: int) -> None:
    """From now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def memory() -> None:
    """Peak of one large request, and what a burst leaves behind."""
    body = bodies()["b64x8big"]
    size = len(body) / 2**20
    with proxy(8) as (port, pid):
        base = rss_mib(pid)
        peaks = []
        for _ in range(5):
            before = rss_mib(pid)
            forget_peak(pid)
            asyncio.run(load.drive(port, body, connections=1, requests=1))
            peaks.append((peak_mib(pid) - before) / size)
        print(f"one {size:.1f} MiB body: peak {max(peaks):.2f} x the body over {base:.0f} MiB", flush=True)
        count = round(160 / size)
        forget_peak(pid)
        result = asyncio.run(load.drive(port, body, connections=count, requests=count))
        high = peak_mib(pid)
        time.sleep(2)
        print(
            f"burst of {count} such: {result.bad} refused, peak {high:.0f} MiB,"
            f" 2 s later {rss_mib(pid):.0f} MiB (base {base:.0f})",
            flush=True,
        )


def soak() -> None:
    """Memory over many requests."""
    body = bodies()["text"]
    with proxy(4) as (port, pid):
        for done in range(0, 50_001, 10_000):
            print(f"after {done:6} requests: {rss_mib(pid):6.1f} MiB", flush=True)
            if done < 50_000:
                asyncio.run(load.drive(port, body, connections=16, requests=10_000))


def streams() -> None:
    """Many streams at once."""
    body = bodies()["stream"]
    with proxy(4, "32", "50", options="--max-inflight 2000") as (port, pid):
        base, before = rss_mib(pid), cpu_s(pid)
        result = asyncio.run(load.drive(port, body, connections=1000, requests=1000))
        spent = 1000 * (cpu_s(pid) - before) / 1000
        fds = psutil.Process(pid).num_fds()
        print(
            f"1000 streams of 32 events: {result.bad} bad, p50 {result.percentile(50):.2f} s,"
            f" p99 {result.percentile(99):.2f} s, cpu {spent:.2f} ms each,"
            f" rss {base:.0f} -> {rss_mib(pid):.0f} MiB, {fds} descriptors afterwards"
        )


if __name__ == "__main__":
    every = {f.__name__: f for f in (encoders, memory, soak, streams)}
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", nargs="*", choices=[*every, []], help="Default: all.")
    for name in ap.parse_args().what or every:
        every[name]()

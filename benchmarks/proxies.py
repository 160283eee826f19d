"""Proxies side by side on the same upstream and the same requests, in one run.

    python benchmarks/proxies.py --guide GUIDE.md [--router] [--relay] [--workloads text,stream,url8]

GUIDE.md is the vendor's guide, from which its proxy is cut (needs fastapi); `--router` adds vllm-router (no
fan-out: text and stream only), `--relay` what only copies bytes (see relay.py), and
`--peer NAME='COMMAND with {port} {encoders} {pd}'` any other.

Proxies take turns, round by round, and medians are printed with their ratio to the first peer. What counts is
CPU milliseconds per request of the proxy's whole process tree: it holds on a shared machine, times do not.
"""

import argparse
import asyncio
import base64
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import load
import psutil

HERE = Path(__file__).resolve().parent
ECCON = (
    f"{sys.executable} -m eccon_proxy --host 127.0.0.1 --port {{port}} "
    "--encode-servers-urls {encoders} --decode-servers-urls {pd} --admin unix:{folder}/admin.sock"
)
ROUTER = (
    "vllm-router --host 127.0.0.1 --port {port} --worker-urls {pd} --policy round_robin "
    "--log-level error --prometheus-port {spare}"
)


def guide_proxy(guide: Path, folder: Path, python: str) -> str:
    """The command of the guide's own proxy, cut out of its text."""
    text = guide.read_text()
    start = text.index('#!/usr/bin/env python3\n"""\nEC Disaggregated')
    script = folder / "guide_proxy.py"
    script.write_text(text[start : text.index("\n4.6 ", start)])
    return (
        f"{python} {script} --host 127.0.0.1 --port {{port}} "
        "--encode-servers-urls {encoders} --decode-servers-urls {pd}"
    )


def bodies() -> dict[str, bytes]:
    """The workloads' request bodies."""

    def image(kib: int) -> dict[str, object]:
        data = base64.b64encode(os.urandom(kib * 768)).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}

    def chat(content: object, *, stream: bool = False) -> bytes:
        messages = [{"role": "user", "content": content}]
        return json.dumps({"model": "m", "messages": messages, "max_tokens": 16, "stream": stream}).encode()

    text = {"type": "text", "text": "Briefly describe each of these images."}
    urls = [{"type": "image_url", "image_url": {"url": f"http://127.0.0.1:9/{i}.jpg"}} for i in range(8)]
    return {
        "text": chat("hello"),
        "stream": chat("hello", stream=True),
        "url8": chat([*urls, text]),
        "b64x1": chat([image(100), text]),
        "b64x8": chat([*(image(100) for _ in range(8)), text]),
        "b64x8big": chat([*(image(1024) for _ in range(8)), text]),
    }


REQUESTS = {"text": 4000, "stream": 400, "url8": 800, "b64x1": 1200, "b64x8": 300, "b64x8big": 40}


def cpu_s(pid: int) -> float:
    """User and system seconds of a process and its children."""
    every = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(t.user + t.system for t in (p.cpu_times() for p in every))


def rss_mib(pid: int) -> float:
    """Resident memory of the tree."""
    every = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(p.memory_info().rss for p in every) / 2**20


@contextmanager
def started(command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of our own, ended by pid at the end."""
    with log.open("wb") as out:
        child = subprocess.Popen(shlex.split(command), stdout=out, stderr=out)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_until_served(port: int, body: bytes, log: Path) -> None:
    """Returns when the proxy answers 200; exits with its log when it does not within 30 s."""
    probe = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    for _ in range(150):
        try:
            with urllib.request.urlopen(probe, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"no answer on {port}; its log:\n{log.read_text()[-2000:]}")


def main() -> None:
    """Measures and prints."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--guide", type=Path)
    ap.add_argument("--guide-python", default=sys.executable, help="One that has fastapi")
    ap.add_argument("--router", nargs="?", const="vllm-router", help="Its command, when not on the path")
    ap.add_argument("--relay", action="store_true")
    ap.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    ap.add_argument("--workloads", default="text,stream,url8,b64x1,b64x8")
    ap.add_argument("--encoders", type=int, default=4)
    ap.add_argument("--connections", type=int, default=8)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--port", type=int, default=23000, help="First of encoders + 20 free ports.")
    ap.add_argument("--json", type=Path)
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = {"guide": guide_proxy(args.guide, folder, args.guide_python)} if args.guide else {}
        commands["eccon"] = ECCON
        if args.router:
            commands["router"] = ROUTER.replace("vllm-router", args.router, 1)
        if args.relay:
            commands["relay"] = f"{sys.executable} {HERE / 'relay.py'} {{port}} {args.port}"
        commands |= dict(peer.split("=", 1) for peer in args.peer)
        json_out = compare(args, folder, commands)
    if args.json:
        args.json.write_text(json.dumps(json_out, indent=1))


def compare(args: argparse.Namespace, folder: Path, commands: dict[str, str]) -> list[dict[str, object]]:
    """All workloads over all proxies, in turn."""
    first = args.port
    pd, *encoders = [f"http://127.0.0.1:{p}" for p in range(first, first + args.encoders + 1)]
    work = bodies()
    rows: list[dict[str, object]] = []
    upstream = f"{sys.executable} {HERE / 'upstream.py'} {first} {args.encoders + 1}"
    with ExitStack() as stack:
        stack.enter_context(started(upstream, folder / "upstream.log"))
        running: dict[str, tuple[int, int]] = {}
        for i, (name, command) in enumerate(commands.items()):
            port = first + args.encoders + 1 + 2 * i
            argv = command.format(
                port=port, encoders=",".join(encoders), pd=pd, spare=port + 1, folder=folder
            )
            log = folder / f"{name}.log"
            child = stack.enter_context(started(argv, log))
            wait_until_served(port, work["text"], log)
            running[name] = (port, child.pid)
        for load_name in args.workloads.split(","):
            rows += measure(args, load_name, work[load_name], running)
    return rows


def measure(
    args: argparse.Namespace, name: str, body: bytes, running: dict[str, tuple[int, int]]
) -> list[dict[str, object]]:
    """One workload; prints a line a proxy."""
    figures: dict[str, list[tuple[float, load.Result]]] = {}
    for _ in range(args.rounds):
        for proxy, (port, pid) in running.items():
            if proxy in {"router", "relay"} and name not in {"text", "stream"}:
                continue
            before = cpu_s(pid)
            count = REQUESTS[name]
            result = asyncio.run(load.drive(port, body, connections=args.connections, requests=count))
            spent = cpu_s(pid) - before
            figures.setdefault(proxy, []).append((1000 * spent / len(result.latencies), result))
    base = statistics.median(f[0] for f in next(iter(figures.values())))
    rows: list[dict[str, object]] = []
    for proxy, runs in figures.items():
        cpu = statistics.median(r[0] for r in runs)
        last = runs[-1][1]
        rss = rss_mib(running[proxy][1])
        bad = sum(r[1].bad for r in runs)
        p50, p99 = last.percentile(50) * 1000, last.percentile(99) * 1000
        print(
            f"{name:9} {proxy:8} cpu {cpu:7.3f} ms/req  x{cpu / base:5.2f}  p50 {p50:7.2f} ms"
            f"  p99 {p99:7.2f} ms  rss {rss:5.0f} MiB  bad {bad}",
            flush=True,
        )
        row = {"workload": name, "proxy": proxy, "cpu_ms": cpu, "ratio": cpu / base, "p50_ms": p50}
        rows.append({**row, "p99_ms": p99, "rss_mib": rss, "bad": bad})
    return rows


if __name__ == "__main__":
    main()

"""What a proxy adds to the latency of one request at a time, beside the guide's proxy and vllm-router.

    python benchmarks/latency.py [--guide GUIDE.md] [--router] [--workloads text,stream,url8,b64x1]

One keep-alive connection, one request after the other, to the upstream itself (`none`) and to each proxy, in
turn, round by round. Printed are medians over the rounds of each round's p50 and p99, and what is over those
of `none`, in milliseconds; for a stream that is the time to its end, 256 events sent as fast as they go.
Requests with images have no `none`: two hops are what they are about. See proxies.py for the flags.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import load
from proxies import ECCON, HERE, ROUTER, bodies, guide_proxy, started, wait_until_served

REQUESTS = {"text": 1000, "stream": 100, "url8": 200, "b64x1": 200}
ENCODERS = 4


def measure(body: bytes, ports: dict[str, int], count: int, rounds: int) -> dict[str, tuple[float, float]]:
    """p50 and p99 by proxy, in milliseconds."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ports}
    for _ in range(rounds):
        for name, port in ports.items():
            asyncio.run(load.drive(port, body, connections=1, requests=20))
            result = asyncio.run(load.drive(port, body, connections=1, requests=count))
            if result.bad:
                sys.exit(f"{name}: {result.bad} of {count} answers were no 200")
            found[name].append((1000 * result.percentile(50), 1000 * result.percentile(99)))
    return {
        name: (statistics.median(p50 for p50, _ in runs), statistics.median(p99 for _, p99 in runs))
        for name, runs in found.items()
    }


def main() -> None:
    """Measures and prints."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--guide", type=Path)
    ap.add_argument("--guide-python", default=sys.executable, help="One that has fastapi")
    ap.add_argument("--router", nargs="?", const="vllm-router", help="Its command, when not on the path")
    ap.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    ap.add_argument("--workloads", default="text,stream,url8,b64x1")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--port", type=int, default=26000, help="First of 30 free ports.")
    ap.add_argument("--json", type=Path)
    args = ap.parse_args()
    pd, *encoders = [f"http://127.0.0.1:{args.port + i}" for i in range(ENCODERS + 1)]
    work = bodies()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        commands = {"guide": guide_proxy(args.guide, folder, args.guide_python)} if args.guide else {}
        commands["eccon"] = ECCON
        if args.router:
            commands["router"] = ROUTER.replace("vllm-router", args.router, 1)
        commands |= dict(peer.split("=", 1) for peer in args.peer)
        upstream = f"{sys.executable} {HERE / 'upstream.py'} {args.port} {ENCODERS + 1}"
        stack.enter_context(started(upstream, folder / "upstream.log"))
        wait_until_served(args.port, work["text"], folder / "upstream.log")
        ports = {"none": args.port}
        for i, (proxy, command) in enumerate(commands.items()):
            port = args.port + ENCODERS + 1 + 2 * i
            log = folder / f"{proxy}.log"
            places = {"port": port, "spare": port + 1, "pd": pd, "encoders": ",".join(encoders)}
            stack.enter_context(started(command.format(**places, folder=folder), log))
            wait_until_served(port, work["text"], log)
            ports[proxy] = port
        for workload in args.workloads.split(","):
            images = workload not in {"text", "stream"}
            chosen = {n: p for n, p in ports.items() if not images or n not in {"none", "router"}}
            found = measure(work[workload], chosen, REQUESTS[workload], args.rounds)
            base = found.get("none")
            for proxy, (p50, p99) in found.items():
                added = f"  added p50 {p50 - base[0]:7.3f}  p99 {p99 - base[1]:7.3f} ms" if base else ""
                print(f"{workload:8} {proxy:8} p50 {p50:7.3f}  p99 {p99:7.3f} ms{added}", flush=True)
                rows.append({"workload": workload, "proxy": proxy, "p50_ms": p50, "p99_ms": p99})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

"""What users feel: time to first token of image requests under load, with eccon-proxy and the guide's proxy.

    python benchmarks/felt.py --guide GUIDE.md [--guide-python PYTHON] [--requests 500] [--seeds 20260,1,2,3]
                              [--out DIR]

The cluster is the stand-in: a PD and eight encoders whose encode time grows with pixels. Requests arrive as a
Poisson process at 80 % of what the encoders can do, 1 to 8 images each (uniform), sides 224 to 2048 px
(log-uniform), with fixed seeds: both proxies see the same requests at the same times. For each seed a run of
the guide's proxy and one of eccon with `--policy least_work` on eight healthy encoders; for the first seed
also eccon on seven, and eccon on eight of which one hangs. The p99 of one run hangs on the few bursts that
its seed happens to have, so the ratio is given of all runs together, and of each. Prints percentiles and how
they compare, writes `felt.svg` and `felt.png` (the curves) and `felt.json` (every time, the percentiles, the
ratios). Needs matplotlib (extra `bench`) and a quiet machine: the whole cluster runs on it. 500 requests take
about three minutes a run.
"""

import argparse
import asyncio
import base64
import io
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import load
import matplotlib as mpl
import psutil
from PIL import Image
from proxies import ECCON, guide_proxy, started

from eccon.sim import modeldir

mpl.use("svg")
from matplotlib import pyplot as plt  # after its backend is chosen

ENCODERS = 8
MS_PER_MPIX = 600.0
"""Real ones take seconds an image; it also leaves the machine that all this runs on to itself."""
LOAD = 0.8
FIRST = 25000
GUIDE, OURS = "guide, 8 encoders", "eccon, 8 encoders"
SEVEN, HANGS = "eccon, 7 encoders", "eccon, 8 of which 1 hangs"
MODEL = Path(modeldir.__file__).parent / "model"


def picture(rng: random.Random) -> tuple[str, float]:
    """A data URL and its megapixels. The bytes are few, the pixels many; each is another picture."""
    w, h = (round(math.exp(rng.uniform(math.log(224), math.log(2048)))) for _ in "wh")
    image = Image.new("RGB", (w, h), tuple(rng.randrange(256) for _ in "rgb"))
    image.putpixel((rng.randrange(w), rng.randrange(h)), tuple(rng.randrange(256) for _ in "rgb"))
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode(), w * h / 1e6


def requests(count: int, model: str, seed: int) -> tuple[list[bytes], list[float]]:
    """Bodies, and their arrival times in seconds."""
    rng = random.Random(seed)
    bodies, work = [], 0.0
    for _ in range(count):
        parts: list[dict[str, object]] = []
        for _ in range(rng.randint(1, 8)):
            url, mpix = picture(rng)
            work += mpix * MS_PER_MPIX / 1000
            parts.append({"type": "image_url", "image_url": {"url": url}})
        parts.append({"type": "text", "text": "What is this?"})
        messages = [{"role": "user", "content": parts}]
        bodies.append(
            json.dumps({"model": model, "messages": messages, "max_tokens": 8, "stream": True}).encode()
        )
    rate = LOAD * ENCODERS / (work / count)
    at, times = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        times.append(at)
    print(f"{work / count:.2f} s of encoding a request, {rate:.2f} requests/s, {at:.0f} s", flush=True)
    return bodies, times


async def first_token(port: int, body: bytes, limit: float) -> float:
    """Seconds until the first event with text; inf when none came or the answer was an error."""
    start = time.perf_counter()

    async def ask() -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        try:
            writer.write(load.request(body, port))
            if b" 200 " not in await reader.readline():
                return math.inf
            seen = b""
            while data := await reader.read(65536):
                seen += data
                if b'"content":"' in seen.replace(b'"content":""', b""):
                    return time.perf_counter() - start
            return math.inf
        finally:
            writer.close()

    try:
        return await asyncio.wait_for(ask(), limit)
    except (OSError, asyncio.TimeoutError):
        return math.inf


async def replay(port: int, bodies: list[bytes], times: list[float], limit: float = 240.0) -> list[float]:
    """All requests at their times; a first-token time each."""
    begin = time.perf_counter()

    async def one(body: bytes, at: float) -> float:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        return await first_token(port, body, limit)

    return await asyncio.gather(*(one(b, t) for b, t in zip(bodies, times, strict=True)))


def wait_for(url: str) -> None:
    """Until it answers 200; exits after a minute."""
    for _ in range(300):
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"no answer from {url}")


def run(command: str, encoders: int, hang: bool, bodies: list[bytes], times: list[float]) -> list[float]:
    """One cluster, one proxy, all requests."""
    os.environ |= {
        "ECCON_SIM_START_S": "0",
        "ECCON_SIM_ENCODE_MS": "0",
        "ECCON_SIM_ENCODE_MS_PER_MPIX": str(MS_PER_MPIX),
        "ECCON_SIM_PREFILL_MS": "5",
        "ECCON_SIM_TOKEN_MS": "1",
        "ECCON_SIM_BATCH": "64",
    }
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        pull = FIRST + ENCODERS + 1

        def serve(port: int, role: str, extra: dict[str, object]) -> int:
            config = {"ec_connector": "RblnECNixlConnector", "ec_role": role}
            transfer = json.dumps({**config, "ec_connector_extra_config": extra})
            command = (
                f"{sys.executable} -m eccon.sim serve {MODEL} --port {port} --host 127.0.0.1 "
                f"--max-model-len 200000 --ec-transfer-config '{transfer}'"
            )
            return stack.enter_context(started(command, folder / f"{port}.log")).pid

        serve(
            FIRST, "ec_consumer", {"pull_host": "127.0.0.1", "pull_port": pull, "max_concurrent_pulls": 512}
        )
        wait_for(f"http://127.0.0.1:{FIRST}/health")
        producer = {"llm_host": "127.0.0.1", "llm_pull_port": pull, "producer_cache_ttl_s": 600}
        urls = [f"http://127.0.0.1:{FIRST + 1 + i}" for i in range(encoders)]
        pids = [serve(FIRST + 1 + i, "ec_producer", producer) for i in range(encoders)]
        for url in urls:
            wait_for(f"{url}/health")
        port = pull + 1
        argv = command.format(
            port=port, encoders=",".join(urls), pd=f"http://127.0.0.1:{FIRST}", folder=folder
        )
        stack.enter_context(started(argv, folder / "proxy.log"))
        wait_for(f"http://127.0.0.1:{port}/health")
        stopped = _tree(pids[0]) if hang else []
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            return asyncio.run(replay(port, bodies, times))
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)


def _tree(pid: int) -> list[int]:
    return [pid, *(p.pid for p in psutil.Process(pid).children(recursive=True))]


def main() -> None:
    """Measures, prints, draws."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--guide", type=Path, required=True)
    ap.add_argument("--guide-python", default=sys.executable)
    ap.add_argument("--requests", type=int, default=500)
    ap.add_argument("--seeds", default="20260,1,2,3", help="the first also for a cluster with one that hangs")
    ap.add_argument("--out", type=Path, default=Path())
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as name:
        guide = guide_proxy(args.guide, Path(name), args.guide_python)
        ours = ECCON + " --policy least_work --pd-items 512 --encode-timeout 20"
        seeds = [int(x) for x in args.seeds.split(",")]
        runs: dict[str, list[float]] = {GUIDE: [], OURS: []}
        ratios: dict[str, float] = {}
        for seed in seeds:
            bodies, times = requests(args.requests, str(MODEL), seed)
            theirs = run(guide, 8, False, bodies, times)
            mine = run(ours, 8, False, bodies, times)
            runs[GUIDE] += theirs
            runs[OURS] += mine
            ratios[f"p99, eccon's of the guide's, seed {seed}"] = (
                summary(mine)["p99"] / summary(theirs)["p99"]
            )
            if seed == seeds[0]:
                runs[SEVEN] = run(ours, 7, False, bodies, times)
                runs[HANGS] = run(ours, 8, True, bodies, times)
    figures = {label: summary(found) for label, found in runs.items()}
    for label, f in figures.items():
        quantiles = "  ".join(f"{name} {f[name]:6.2f}" for name in ("p50", "p90", "p99"))
        print(f"{label:28} {quantiles} s  lost {f['lost']:.0f}")
    ratios["p99, eccon's of the guide's"] = figures[OURS]["p99"] / figures[GUIDE]["p99"]
    ratios["p99, one of eight hangs of seven healthy"] = figures[HANGS]["p99"] / figures[SEVEN]["p99"]
    for label, ratio in ratios.items():
        print(f"{label}: {ratio:.2f}")
    args.out.mkdir(parents=True, exist_ok=True)
    times_s = {
        label: [None if x == math.inf else round(x, 4) for x in found] for label, found in runs.items()
    }
    report = {
        "requests": args.requests,
        "seeds": seeds,
        "figures": {label: finite(f) for label, f in figures.items()},
        "ratios": finite(ratios),
        "ttft_s": times_s,
    }
    (args.out / "felt.json").write_text(json.dumps(report, indent=1, allow_nan=False))
    draw(runs, args.out)


def summary(found: list[float]) -> dict[str, float]:
    """Seconds at the percentiles over all requests: one that was lost took for ever, which may come out."""
    ordered = sorted(found)
    cuts = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)}
    return {**cuts, "lost": float(sum(x == math.inf for x in found))}


def finite(figures: dict[str, float]) -> dict[str, float | None]:
    """As JSON can say it: null for what never came."""
    return {name: x if math.isfinite(x) else None for name, x in figures.items()}


def draw(runs: dict[str, list[float]], folder: Path) -> None:
    """Share of requests whose first token came within so many seconds."""
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for label, found in runs.items():
        came = sorted(x for x in found if x < math.inf)
        axes.step(came, [(i + 1) / len(found) for i in range(len(came))], label=label, where="post")
    axes.set(xlabel="time to first token, s", ylabel="share of requests", ylim=(0, 1.01), xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    for name in ("felt.svg", "felt.png"):
        figure.savefig(folder / name, dpi=150)


if __name__ == "__main__":
    main()

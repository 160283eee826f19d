"""Log lines, log files, metrics and trees of processes, read as the children write them."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from eccon.signals import milestones
from eccon.signals.connector import ItemEvent, Notice, parse
from eccon.signals.histogram import Recent
from eccon.signals.histogram import quantiles as merged
from eccon.signals.tail import Tail
from eccon.signals.transfers import Delivery, Transfers, quantiles
from eccon.signals.usage import Usage
from eccon.signals.vllm_metrics import EngineMetrics

LOGGER = "vllm_rbln.distributed.ec_transfer.ec_connector.rbln_ec_nixl_connector"


def line(
    at: float, message: str, *, prefix: str = "(EngineCore pid=7) ", thread: str = "MainThread"
) -> bytes:
    """As the logging configuration makes it."""
    return f"{prefix}{at:.6f} DEBUG 7 {thread} {LOGGER}:109 {message}\n".encode()


@pytest.mark.parametrize(
    ("message", "step"),
    [
        ("EC Nixl: registered + pushed mm_hash=ec-1a", "pushed"),
        ("EC Nixl: received metadata for mm_hash=ec-1a from engine=e1", "received"),
        ("EC Nixl: initiated pull for mm_hash=ec-1a", "initiated"),
        ("EC Nixl: pull complete for mm_hash=ec-1a", "complete"),
        ("EC Nixl: ACK status=ok for mm_hash=ec-1a, evicting", "acked"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "(EngineCore pid=7) ", "(Worker pid=12) ", "(EngineCore_DP0 pid=7) "])
def test_each_step_of_an_item_is_read_with_its_microseconds(message: str, step: str, prefix: str) -> None:
    text = b"noise mm_hash=x\n" + line(1795980741.097610, message, prefix=prefix, thread="Thread-2 (run)")
    assert list(parse(text)) == [ItemEvent(step, 1795980741.09761, "ec-1a")]  # type: ignore[arg-type]


def test_what_only_looks_like_an_event_is_none() -> None:
    text = (
        b"INFO user said: registered + pushed mm_hash=evil\n"
         b"\xff\xfe mm_hash= \x00\n"
         b"(EngineCore pid=7) nan DEBUG 7 MainThread vllm_rbln.distributed.ec_transfer:1 pushed mm_hash=a\n"
        + line(1795980741.0, "EC Nixl: something else about mm_hash=b")
        + b"mm_hash=" + b"z" * 100_000
    )  # fmt: skip
    assert list(parse(text)) == []


def test_announced_deaths_are_known_in_any_format() -> None:
    ours = line(1795980741.0, "EC Nixl: timed out waiting for mm_hash=ec-1a (30.0s)")
    theirs = (
        b"(EngineCore pid=7) [vllm-rbln] WARNING 11-29 19:32:19 [x:1] 3 pulls did not complete within timeout"
    )
    keys = [(e.key, e.severity) for e in parse(ours + theirs) if isinstance(e, Notice)]
    assert keys == [("dying", "critical"), ("dying", "critical")]


def test_what_a_client_writes_into_a_log_announces_nothing() -> None:
    """Prompts are logged on request: as they came, at any place of a line, on lines of their own."""
    text = (
        b"(APIServer pid=7) INFO 11-29 19:32:19 [logger.py:39] Received request: prompt: 'EngineDeadError', "
        b"'timed out waiting for mm_hash=x (30.0s)'\n"
        b"(APIServer pid=7) ERROR 11-29 19:32:19 [serving.py:9] bad prompt: 3 pulls did not complete within "
        b"timeout\n"
        b"EC Nixl: timed out waiting for mm_hash=x (30.0s)\n"
        b"say EngineDeadError, failed to decode received metadata, LRU-evicting mm_hash=q\n"
        + line(1795980741.0, "EC Nixl: no step; EC Nixl: pull complete for mm_hash=b")
    )
    assert list(parse(text)) == []


def test_lines_of_real_servers_are_understood() -> None:
    """As vLLM 0.30 and vllm-rbln 0.12 wrote them."""
    text = (
        b"(Worker pid=7826) [vllm-rbln] WARNING 11-29 19:15:04 [rbln_ec_nixl_connector.py:640] EC Nixl: "
        b"timed out waiting for mm_hash=e329 (30.0s)\n"
        b"(APIServer pid=7095) ERROR 11-29 19:15:04 [async_llm.py:843] vllm.v1.engine.exceptions."
        b"EngineDeadError: EngineCore encountered an issue.\n"
        b"(APIServer pid=7095) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
        + line(1795980741.0, "EC Nixl: LRU-evicting producer cache for mm_hash=ab (capacity=128 reached)")
        + line(1795980741.0, "EC Nixl: TTL-evicting producer cache for mm_hash=cd (ttl=60.0s, consumer …)")
        + line(1795980741.0, "EC Nixl: first contact from consumer engine=e-1")
    )
    events = list(parse(text))
    assert [e.key for e in events if isinstance(e, Notice)] == ["dying"] * 3 + ["evicting", "consumer"]
    assert [(e.step, e.mm_hash) for e in events if isinstance(e, ItemEvent)] == [
        ("evicted", "ab"),
        ("evicted", "cd"),
    ]
    assert [e.peer for e in events if isinstance(e, Notice)][-1] == "e-1"


def test_latencies_merge_over_slices_encoders_and_daemons_and_an_hour_is_kept() -> None:
    chance, now = random.Random(7), 6_000_000.0
    samples = [chance.lognormvariate(2, 1.5) for _ in range(4000)]
    parts = [Recent(), Recent()]
    for n, ms in enumerate(samples):
        parts[n % 2].add(ms, now - 3000 + n % 3000)
    again = [msgspec.json.decode(msgspec.json.encode(p), type=Recent) for p in parts]
    exact, found = quantiles(samples), merged(again, now)
    assert exact is not None
    assert found is not None
    assert found.count == 4000
    assert (found.p50, found.p99) == pytest.approx((exact.p50, exact.p99), rel=0.03)
    assert merged(again, now + 7200) is None
    again[0].add(0.0, now + 7200)
    assert len(again[0].slices) == 1


def test_what_was_read_before_counts_once_and_still_gives_its_delivery() -> None:
    now = time.time()
    steps = [ItemEvent(s, now + n / 1000, "h") for n, s in enumerate(("pushed", "received", "initiated"))]  # type: ignore[arg-type]
    last = ItemEvent("complete", now + 0.01, "h")
    old = Transfers()
    for e in steps:
        assert old.feed("encoder-0" if e.step == "pushed" else "pd", e, old=True) is None
    assert old.feed("pd", last, old=True) is not None
    assert old.of("encoder-0") is None
    assert old.counts("pd") is None
    half = Transfers(old.latencies)
    for e in steps:
        half.feed("encoder-0" if e.step == "pushed" else "pd", e, old=True)
    assert half.pulling_s(now + 5)["encoder-0"] == pytest.approx(5, abs=0.1)
    given_up = Transfers()
    for e in steps:
        given_up.feed("encoder-0" if e.step == "pushed" else "pd", e)
    assert given_up.pulling_s(now + 60) == {}
    assert half.feed("pd", last) is not None
    assert half.pulling_s() == {}
    found = half.of("encoder-0")
    assert found is not None
    assert found.total.count == 1
    half.forget("encoder-0")
    assert half.of("encoder-0") is None
    overall = half.overall()
    assert overall is not None
    assert overall.total.count == 1


def test_a_tail_goes_on_where_another_one_stopped(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"one\ntwo\nthr")
    tail = Tail(path, back=None)
    assert tail.read() == b"one\ntwo\n"
    where = tail.position
    tail.close()
    with path.open("ab") as f:
        f.write(b"ee\n")
    path.rename(tmp_path / "x.log.1")
    path.write_bytes(b"four\n")
    again = Tail(path, resume=where)
    assert again.earlier(1000) == b"one\ntwo\n"
    assert again.earlier(5) == b"two\n"
    assert again.read() == b"three\nfour\n"
    again.close()
    lost = Tail(path, resume=(1, 5))
    assert lost.read() == b""
    lost.close()


def test_transfers_are_matched_whatever_the_order_of_reading() -> None:
    chance = random.Random(5)
    events = []
    for n in range(200):
        t = 100 + n * 0.01
        steps = {"pushed": t, "received": t + 0.001, "initiated": t + 0.101, "complete": t + 0.105}
        events += [
            ("encoder-1" if s == "pushed" else "pd", ItemEvent(s, at, f"h{n}"))  # type: ignore[arg-type]
            for s, at in steps.items()
        ]
    chance.shuffle(events)
    now = time.time()
    events = [(process, ItemEvent(e.step, now + e.at, e.mm_hash)) for process, e in events]
    transfers = Transfers()
    done = [d for process, e in events if (d := transfers.feed(process, e))]
    assert len(done) == 200
    assert {d.encoder for d in done} == {"encoder-1"}
    found = transfers.of("encoder-1")
    assert found is not None
    figures = (found.push.p50, found.wait.p50, found.pull.p50, found.total.p99)
    assert figures == pytest.approx((1.0, 100.0, 4.0, 5.0), rel=0.03)
    assert transfers.overall() == found
    assert transfers.of("encoder-2") is None


def test_items_that_never_arrive_are_forgotten() -> None:
    transfers = Transfers()
    for n in range(20_000):
        transfers.feed("encoder-0", ItemEvent("pushed", float(n), f"h{n}"))
    assert len(transfers._open) <= 8192
    assert len(transfers._encoder) == len(transfers._open)


def test_a_push_read_later_than_its_receipt_is_no_negative_time() -> None:
    assert Delivery("h", "e", 2.0, 1.0, 1.0, 1.5).push_ms == 0


def test_quantiles_by_nearest_rank() -> None:
    assert quantiles([]) is None
    q = quantiles(float(n) for n in range(1, 101))
    assert q is not None
    assert (q.count, q.p50, q.p99) == (100, 51.0, 99.0)


def test_a_tail_sees_every_line_over_rotations(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    tail = Tail(path)
    assert tail.read() == b""
    got = b""
    written = b""
    n = 0
    for turn in range(6):
        with path.open("ab") as f:
            for _ in range(50):
                f.write(b"line %d\n" % n)
                written += b"line %d\n" % n
                n += 1
            f.write(b"par")
        if turn % 2:
            got += tail.read()
        with path.open("ab") as f:
            f.write(b"tial\n")
        written += b"partial\n"
        for k in (3, 2, 1):
            older = path.with_name(f"x.log.{k}")
            newer = path.with_name(f"x.log.{k - 1}") if k > 1 else path
            if newer.exists():
                newer.replace(older)
    got += tail.read()
    assert got == written
    assert tail.lost == 0
    tail.close()


def test_a_tail_that_was_outrun_says_so_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"seen\n")
    tail = Tail(path, back=None)
    assert tail.read() == b"seen\n"
    path.unlink()
    path.with_name("x.log.1").write_bytes(b"newer\n")
    path.write_bytes(b"newest\n")
    assert tail.read() == b"newer\nnewest\n"
    assert tail.lost == 1
    tail.close()


def test_a_tail_begins_at_the_end_or_some_bytes_before_it(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"".join(b"%04d\n" % n for n in range(100)))
    end, back = Tail(path), Tail(path, back=12)
    with path.open("ab") as f:
        f.write(b"new\n")
    assert end.read() == b"new\n"
    assert back.read() == b"0098\n0099\nnew\n"
    end.close()
    back.close()


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("vLLM API server version 0.30.0", "starting vLLM"),
        ("non-default args: {'port': 1}", "starting vLLM"),
        ("Resolved architecture: Qwen3VL", "reading the model's configuration"),
        ("Initializing a V1 LLM engine (v0.30.0)", "starting the engine"),
        ("EC Nixl: PULL bound on tcp://0.0.0.0:1", "connecting encoders and PD"),
        ("EC Nixl: PUSH connected to tcp://0.0.0.0:1", "connecting encoders and PD"),
        ("Starting to load model X...", "loading the model"),
        ("Loading safetensors checkpoint shards:  50% Completed | 1/2", "loading weights"),
        ("Loading weights took 1.2 seconds", "weights loaded"),
        ("Model loading took 1.2 GiB", "model loaded"),
        ("torch.compile takes 3.2 s", "compiling"),
        ("Compiling the model", "compiling"),
        ("CPU KV cache size: 3 tokens", "sizing the KV cache"),
        ("Available KV cache memory: 3 GiB", "sizing the KV cache"),
        ("Warming up model for the compilation", "warming up"),
        ("warmup done", "warming up"),
        ("init engine (profile, warmup model) took 3 s", "engine initialised"),
        ("Starting vLLM API server 0 on http://", "opening the API"),
        ("Application startup complete.", "API is up"),
    ],
)
def test_each_step_is_known_by_its_line_alone(text: str, step: str) -> None:
    line = f"INFO 11-30 01:02:03 [x.py:1] {text}\n".encode()
    assert [s.text for s in milestones.steps(b"noise\n" + line)] == [step]


def test_milestones_in_their_order_and_what_is_left_of_the_start() -> None:
    log = (
        b"(APIServer pid=1) INFO 11-29 19:32:19 [x:1] non-default args: {}\n"
        b"(EngineCore pid=2) INFO 11-29 [core:66] Initializing a V1 LLM engine (v0.30.0) with config: x\n"
        b"(EngineCore pid=2) Loading safetensors checkpoint shards:  50% Completed | 2/4\n"
        b"(EngineCore pid=2) INFO [core] init engine (profile, create kv cache, warmup model) took 4.01 s\n"
        b"(APIServer pid=1) INFO [l:118] Starting vLLM server on http://127.0.0.1:24100\n"
        b"(APIServer pid=1) INFO [uvicorn.error:62] Application startup complete.\n"
    )
    seen = list(milestones.steps(log))
    assert [s.text for s in seen] == [
        "starting vLLM", "starting the engine", "loading weights", "engine initialised",
        "opening the API", "API is up",
    ]  # fmt: skip
    fractions = [s.fraction for s in seen]
    assert fractions == sorted(fractions)
    history = milestones.History()
    assert history.remaining("pd", None, 1.0) is None
    for total in (50.0, 60.0, 70.0):
        history.add("pd", {"starting vLLM": 2.0}, total)
    assert history.remaining("pd", None, 10.0) == 50.0
    assert history.remaining("pd", "starting vLLM", 8.0) == 50.0
    assert history.remaining("pd", "starting vLLM", 500.0) == 0.0
    assert history.remaining("pd", "compiling", 0.0) is None


def test_metrics_become_gauges_and_rates_and_a_new_life_begins_afresh() -> None:
    def text(tokens: int, waited: float, count: int) -> str:
        return (
            "# TYPE vllm:num_requests_running gauge\n"
            'vllm:num_requests_running{engine="0",model_name="a\\"} b"} 3.0\n'
            'vllm:num_requests_waiting{engine="0"} 2.0\nvllm:kv_cache_usage_perc{engine="0"} 0.51234\n'
            f'vllm:generation_tokens_total{{engine="0"}} {tokens}\n'
            f'vllm:time_to_first_token_seconds_sum{{engine="0"}} {waited}\n'
            f'vllm:time_to_first_token_seconds_count{{engine="0"}} {count}\nvllm:prompt_tokens_total x\n'
        )

    metrics = EngineMetrics()
    first = metrics.take("pd@1", text(100, 1.0, 10), now=10.0)
    assert first is not None
    assert (first.running, first.waiting, first.kv_use, first.generated_per_s) == (3, 2, 0.512, None)
    second = metrics.take("pd@1", text(600, 1.5, 15), now=15.0)
    assert second is not None
    assert (second.generated_per_s, second.ttft_ms) == (100.0, 100.0)
    third = metrics.take("pd@2", text(5, 0.1, 1), now=20.0)
    assert third is not None
    assert third.generated_per_s is None
    assert metrics.take("pd@2", "no vLLM here", now=21.0) is None


def test_usage_is_of_the_whole_tree() -> None:
    busy = "print(1, flush=True)\nwhile True: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        usage = Usage()
        first = usage.sample({"x": parent.pid})["x"]
        assert first.cpu_percent is None
        assert first.rss_bytes > 10 * 2**20
        figures = first
        for _ in range(200):
            figures = usage.sample({"x": parent.pid})["x"]
            if figures.cpu_percent and figures.cpu_percent > 5:
                break
            os.sched_yield()
            subprocess.run([sys.executable, "-c", ""], check=True)
        assert figures.cpu_percent is not None
        assert figures.cpu_percent > 5, "the busy child counts"
        os.killpg(parent.pid, 9)
    assert usage.sample({"x": parent.pid}) == {}


def test_usage_counts_what_was_left_to_the_keeper() -> None:
    """A shim takes what a process forked twice, in a session of its own."""
    with (
        subprocess.Popen(["sleep", "1000"], start_new_session=True) as main,
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import subprocess; subprocess.run(['sleep', '1000'], start_new_session=True)",
            ]
        ) as keeper,
    ):
        deadline = time.monotonic() + 20
        rss = 0
        alone = Usage().sample({"x": main.pid})["x"].rss_bytes
        while rss <= alone and time.monotonic() < deadline:
            rss = Usage().sample({"x": main.pid}, {"x": keeper.pid})["x"].rss_bytes
            time.sleep(0.02)
        children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
        for pid in (*map(int, children), main.pid):
            os.kill(pid, 9)
    assert rss > alone

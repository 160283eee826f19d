"""What only the stand-in can do or show: its tunables and faults, and the arithmetic under it."""

import json
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import pytest

from eccon.sim import flags, identity, tunables, vision
from eccon.sim.cache import EncoderCache
from eccon.sim.faults import Faults
from eccon.sim.memory import PAGE, Arena
from eccon.sim.modeldir import Model, load
from eccon.sim.process import set_title
from eccon.sim.samples import SAMPLES
from tests.contract.client import ask, fresh, get, image, metric, part, png, request, text
from tests.contract.cluster import Cluster
from tests.contract.target import Server, Target, free_port, until

DESCRIPTIONS = """\
image 1: PNG 640x480 #dd767b
image 2: JPEG 800x600 #687f7d
image 3: WEBP 512x512 #60a985
image 4: GIF 320x240 #f0ad82
image 5: PNG 1024x768 #8d9fba
image 6: BMP 128x128 #888984
image 7: JPEG 600x900 #e7b8b0
image 8: WEBP 1280x720 #7449b8"""


def _colours(described: str) -> list[tuple[str, list[int]]]:
    rows = [line.rpartition(" #") for line in described.splitlines()]
    return [(what, list(bytes.fromhex(colour))) for what, _, colour in rows]


def test_the_answer_names_what_the_encoders_saw(cluster: Cluster) -> None:
    """Decoders differ by a shade between versions; everything else is exact."""
    parts = [part(fresh(), image(p.read_bytes())) for p in SAMPLES]
    for i, one in enumerate(parts):
        assert ask(cluster.encoders[i % 2], [one], max_tokens=1).status == 200
    told = ask(cluster.pd, [*parts, text()], max_tokens=400).answer()[0]
    for (what, colour), (expected, shade) in zip(_colours(told), _colours(DESCRIPTIONS), strict=True):
        assert what == expected
        assert all(abs(a - b) <= 2 for a, b in zip(colour, shade, strict=True))


def test_the_pd_never_looks_at_the_picture(cluster: Cluster) -> None:
    """Another picture, even none, under the same name: the answer is what was encoded."""
    u = fresh()
    assert ask(cluster.encoders[0], [part(u, image(png(320, 64, (1, 2, 3))))], max_tokens=1).status == 200
    for lie in (image(png(64, 64, (9, 9, 9))), "data:image/png;base64,aGVsbG8="):
        told = ask(cluster.pd, [part(u, lie), text()], max_tokens=40).answer()[0]
        assert told == "image 1: PNG 320x64 #010203"


def test_a_plain_server_does_it_all(target: Target) -> None:
    argv = [*target.command, target.model, "--port", str(port := free_port()), "--host", "127.0.0.1"]
    process = subprocess.Popen(
        argv, env=target.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: _answers(url), 20, "not ready")
        content = [part(None, image(png(64, 64, (5, 6, 7)))), text()]
        data = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
        told = json.loads(_post(url, data))
        assert told["choices"][0]["message"]["content"] == "image 1: PNG 64x64 #050607"
        assert told["model"] == target.model
    finally:
        process.terminate()
        assert process.wait(10) == 0


def _answers(url: str) -> bool:
    from urllib.error import URLError
    from urllib.request import urlopen

    try:
        with urlopen(url + "/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except URLError:
        return False


def _post(url: str, data: bytes) -> bytes:
    from urllib.request import Request, urlopen

    request = Request(url + "/v1/chat/completions", data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=20) as reply:
        body: bytes = reply.read()
        return body


def test_processes_and_their_titles(cluster: Cluster) -> None:
    """A server and its engine, nothing else, each small; the real one is a hundred times as large."""
    family = cluster.pd.family()
    assert len(family) == 2
    assert Path(f"/proc/{cluster.pd.engine().pid}/comm").read_text() == "VLLM::EngineCor\n"
    assert cluster.pd.engine().ppid() == cluster.pd.pid
    assert sum(p.memory_info().rss for p in family) < 110e6


def test_a_remote_picture_is_seen_as_it_is(cluster: Cluster, pictures: str) -> None:
    u = fresh()
    one = part(u, f"{pictures}/a.png")
    assert ask(cluster.encoders[0], [one], max_tokens=1).status == 200
    assert ask(cluster.pd, [one, text()], max_tokens=40).answer()[0] == "image 1: PNG 96x64 #0a141e"


def test_items_of_waiting_requests_count_as_well(target: Target) -> None:
    """As in vllm-rbln's scheduler: eight requests of one item are too many for one pull a step.

    Those that are put off are taken up in no order, so the next prefill's item is hardly ever among them.
    """
    port = free_port()
    pd = target.pd(port, max_concurrent_pulls=1, env={"ECCON_SIM_PREFILL_MS": "20000"})
    encoder = target.encoder(port)
    with target.lent(pd, encoder), ThreadPoolExecutor(9) as pool:
        names = [fresh() for _ in range(8)]
        for u in names:
            ask(encoder, [part(u)], max_tokens=1)
        busy = pool.submit(ask, pd, "keep it busy", max_tokens=1)
        asked = [pool.submit(ask, pd, [part(u), text()], max_tokens=1) for u in names]
        assert busy.result().status == 200
        assert {a.result().status for a in asked} == {200, 500}
        assert pd.exit_code(20) == 0
        assert "Encoder cache miss for item-" in pd.log()


def test_an_item_encoded_twice_is_acknowledged_once(target: Target) -> None:
    """Without room in the caches (as in vllm-rbln) an item is encoded, pushed and pulled at every use.

    The PD has acknowledged it once and does not again: from the third use on the encoder pushes no more.
    """
    port, u = free_port(), fresh()
    none = {"ECCON_SIM_CACHE_TOKENS": "0"}
    pd, encoder = target.pd(port, env=none), target.encoder(port, env=none)
    with target.lent(pd, encoder):
        for _ in range(3):
            assert ask(encoder, [part(u)], max_tokens=1).status == 200
            assert ask(pd, [part(u), text()]).status == 200
            until(lambda: bool(_other(encoder, pd)), 5, "?")
        assert len(encoder.events(f"pushed mm_hash={u}")) == 2
        assert len(encoder.events(f"ACK status=ok for mm_hash={u}")) == 1
        assert len(pd.events(f"pull complete for mm_hash={u}")) == 3


def _other(encoder: Server, pd: Server) -> bool:
    v = fresh()
    return ask(encoder, [part(v)], max_tokens=1).status == 200 and ask(pd, [part(v), text()]).status == 200


def test_an_encoder_works_first_in_first_out(target: Target) -> None:
    port = free_port()
    encoder = target.encoder(port, env={"ECCON_SIM_ENCODE_MS": "15000"})
    with target.lent(encoder), ThreadPoolExecutor(3) as pool:
        began = time.monotonic()
        replies = list(pool.map(lambda _: ask(encoder, [part(fresh())], max_tokens=1), range(3)))
        assert all(r.status == 200 for r in replies)
        assert time.monotonic() - began > 3 * 15.0 * target.scale
        times = sorted(r.seconds for r in replies)
        assert times[-1] > 2 * times[0]


def test_a_pd_has_as_many_slots_as_its_batch(target: Target) -> None:
    pd = target.pd(free_port(), env={"ECCON_SIM_BATCH": "2", "ECCON_SIM_TOKEN_MS": "300"})
    with target.lent(pd), ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            pool.submit(ask, pd, "go on", max_tokens=60, ignore_eos=True)
        until(lambda: metric(pd, "vllm:num_requests_running") == 2, 10, "not two of them run")
        until(lambda: metric(pd, "vllm:num_requests_waiting") == 1, 10, "nobody waits")


def test_a_video_is_a_name_to_the_pd(target: Target) -> None:
    """Whoever lets one through unencoded stalls the PD."""
    pd = target.launch(
        "pd", "ec_consumer", {"pull_port": free_port()}, "--limit-mm-per-prompt", '{"image":8}'
    )
    with target.lent(pd):
        video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
        assert ask(pd, [video, text()]).status == 500
        assert pd.exit_code(20) == 0
        assert pd.events("timed out waiting for mm_hash=")


@pytest.fixture
def fault(tmp_path: Path) -> Path:
    """A file that says what goes wrong."""
    made = tmp_path / "fault"
    made.write_text("")
    return made


def test_faults_of_an_encoder_that_come_and_go(target: Target, cluster: Cluster, fault: Path) -> None:
    encoder = target.encoder(cluster.pull_port, env={"ECCON_SIM_FAULT": f"@{fault}"})
    with target.lent(encoder):
        fault.write_text("encode-error")
        reply = ask(encoder, [part(fresh())])
        assert (reply.status, reply.error()["message"]) == (500, "Internal server error")
        fault.write_text("encode-hang health-hang")
        for content in ([part(fresh())], "only text"):
            with pytest.raises(TimeoutError):
                ask(encoder, content, timeout=0.5)
        with pytest.raises(TimeoutError):
            request(encoder, "GET", "/health", None, {}, 0.5)
        fault.write_text("push-drop")
        u = fresh()
        assert ask(encoder, [part(u)]).status == 200
        assert not encoder.events(f"pushed mm_hash={u}")
        fault.write_text("")
        assert ask(encoder, [part(fresh())]).status == 200
        assert get(encoder, "/health").status == 200
        fault.write_text("encode-crash")
        assert ask(encoder, [part(fresh())]).status == 500
        assert encoder.exit_code(20) == 0


def test_an_encoder_that_dies_after_its_push(target: Target, cluster: Cluster) -> None:
    encoder = target.encoder(cluster.pull_port, env={"ECCON_SIM_FAULT": "die-after-push:1"})
    with target.lent(encoder):
        u = fresh()
        with pytest.raises((HTTPException, ConnectionError)):
            ask(encoder, [part(u)])
        assert encoder.exit_code(5) == -signal.SIGKILL
        until(lambda: not encoder.family(), 20, "its engine lives on")
        cluster.pd.wait_event(f"received metadata for mm_hash={u}")
    assert ask(cluster.pd, "hello").status == 500


def test_a_start_that_fails(target: Target) -> None:
    server = target.pd(free_port(), env={"ECCON_SIM_FAULT": "start-fail"})
    assert server.exit_code(20) == 1
    assert "EngineCore failed to start." in server.log()
    assert "Engine core initialization failed" in server.log()
    assert not server.family()


def test_sigterm_while_loading(target: Target) -> None:
    server = target.pd(free_port(), env={"ECCON_SIM_FAULT": "start-hang"})
    server.wait_log("Loading weights took")
    server.signal(signal.SIGTERM)
    assert server.exit_code(10) == 130
    until(lambda: not server.family(), 5, "it left somebody behind")


def test_sigterm_that_is_not_heeded(target: Target) -> None:
    server = target.pd(free_port(), env={"ECCON_SIM_FAULT": "ignore-term"})
    server.wait_ready()
    server.signal(signal.SIGTERM, everyone=True)
    assert ask(server, "hello").status == 200
    server.destroy()


@pytest.mark.parametrize(
    ("name", "value"),
    [("TIME_SCALE", "fast"), ("ENCODE_MS", "-1"), ("BATCH", "0"), ("BATCH", "1.5"), ("CACHE_TOKENS", "x")],
)
def test_tunables_that_make_no_sense(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"ECCON_SIM_{name}", value)
    with pytest.raises(tunables.TunableError, match=f"ECCON_SIM_{name}"):
        tunables.load()


def test_flags_as_vllm_reads_them() -> None:
    serve = flags.parse(
        [
            *("some/model", "--max_num_seqs=4", "--port", "1234", "-tp", "8", "--max-model-len", "32K"),
            *("--ec-transfer-config.ec_connector", "RblnECNixlConnector"),
            *("--ec-transfer-config.ec_role", "ec_producer"),
            *("--ec-transfer-config.ec_connector_extra_config.llm_pull_port", "19500"),
        ]
    )
    assert (serve.model, serve.served_names, serve.port) == ("some/model", ("some/model",), 1234)
    assert (serve.role, serve.extra) == ("producer", {"llm_pull_port": 19500})
    assert (serve.max_num_seqs, serve.max_model_len) == (4, 32768)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["m", "--unknown"],
        ["m", "--port", "x"],
        ["m", "--ec-transfer-config", "{"],
        ["m", "--ec-transfer-config", '{"ec_connector":"RblnECNixlConnector"}'],
        ["m", "--ec-transfer-config", '{"ec_connector":"Other","ec_role":"ec_consumer"}'],
        ["m", "--max-model-len", "many"],
    ],
)
def test_flags_that_are_refused(argv: list[str]) -> None:
    with pytest.raises(flags.FlagError):
        flags.parse(argv)


def _model(target: Target) -> Model:
    return load(target.model, {"max_pixels": 802816})


def test_sizes_come_from_the_model_directory(target: Target, tmp_path: Path) -> None:
    config = json.loads((Path(target.model) / "config.json").read_text())
    config["text_config"]["hidden_size"] = 32
    config["vision_config"]["deepstack_visual_indexes"] = [1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(str(tmp_path), {})
    assert (model.width, model.batch, model.max_pixels) == (64, 8, 16777216)
    picture = vision.Picture("PNG", 64, 64, (1, 2, 3))
    tensor = vision.encode(model, picture, 64)
    assert (tensor.shape, len(tensor.data)) == ((64, 64), 64 * 64 * 2)
    assert vision.describe(tensor) == picture


def test_a_tensor_of_somebody_else_is_noticed(target: Target) -> None:
    tensor = vision.encode(_model(target), vision.Picture("PNG", 64, 64, (1, 2, 3)), 64)
    for damaged in (b"", b"x" * 100, tensor.data[:12]):
        with pytest.raises(vision.TensorError):
            vision.describe(vision.Tensor(tensor.shape, damaged))


def test_addresses_are_used_again_first_fit() -> None:
    arena = Arena()
    a, b, c = (arena.allocate(bytes([i]) * n) for i, n in enumerate((PAGE, 3 * PAGE, 1)))
    assert (b - a, c - b) == (PAGE, 3 * PAGE)
    arena.free(b)
    assert arena.read(b, 1) is None
    d = arena.allocate(b"d" * 2 * PAGE)
    e = arena.allocate(b"e" * 2 * PAGE)
    assert (d, e) == (b, c + PAGE)
    arena.free(d)
    arena.free(a)
    assert arena.allocate(b"f" * 4 * PAGE) == a
    assert arena.read(a, 3) == b"fff"
    assert arena.read(a, 5 * PAGE) is None
    assert dict(arena.regions()) == {a: 4 * PAGE, c: 1, e: 2 * PAGE}


def test_what_is_idle_goes_when_room_is_needed() -> None:
    cache = EncoderCache(100)
    for name in "abc":
        cache.use("r" + name, name)
        cache.tensors[name] = vision.Tensor((40, 1), b"")
    cache.release("ra", "a")
    cache.release("rb", "b")
    cache.use("rd", "a")
    cache.trim()
    assert sorted(cache.tensors) == ["a", "c"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"model": "./m"}, False),
        ({"content": b"y"}, False),
        ({"mm_processor_kwargs": {"max_pixels": 1}}, False),
        ({"mm_processor_kwargs": {}}, True),
        ({"media_io_kwargs": {"image": {"a": 1}}}, False),
        ({"media_io_kwargs": {"video": {"a": 1}}}, True),
        ({"modality": "video"}, False),
        ({"uuid": "u"}, False),
    ],
)
def test_what_makes_a_name(change: dict[str, object], same: bool) -> None:
    base: dict[str, object] = {"model": "m", "modality": "image", "content": b"x", "uuid": None}
    base |= {"mm_processor_kwargs": None, "media_io_kwargs": None}

    def name(values: dict[str, object]) -> str:
        rest = dict(values)
        return identity.mm_hash(rest.pop("model"), rest.pop("modality"), **rest)  # type: ignore[arg-type]

    assert (name(base) == name(base | change)) is same


def test_faults_are_counted() -> None:
    faults = Faults("a:2, b")
    assert [faults.take("a") for _ in range(4)] == [True, True, False, False]
    assert faults.take("b")
    assert not faults.take("c")
    assert faults.named("a")


def test_a_title_replaces_the_command_line() -> None:
    script = (
        "import sys; from eccon.sim.process import set_title; set_title('VLLM::EngineCore');"
        "print(open('/proc/self/cmdline').read().rstrip(chr(0))); print(open('/proc/self/comm').read())"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["VLLM::EngineCore", "VLLM::EngineCor"]
    assert callable(set_title)


@pytest.mark.parametrize("argv", [[], ["bench"]])
def test_only_serve_is_there(argv: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "eccon.sim", *argv], capture_output=True, text=True)
    assert done.returncode == 2
    assert "serve MODEL" in done.stderr


def test_a_logging_configuration_that_is_not_there(target: Target) -> None:
    server = target.pd(free_port(), env={"VLLM_LOGGING_CONFIG_PATH": "/nowhere"})
    assert server.exit_code(20) == 1
    assert "Could not load logging config. File does not exist: /nowhere" in server.log()


def test_the_default_format(target: Target, cluster: Cluster) -> None:
    env = {"VLLM_LOGGING_CONFIG_PATH": "", "VLLM_LOGGING_LEVEL": "DEBUG"}
    encoder = target.encoder(cluster.pull_port, env=env)
    with target.lent(encoder):
        u = fresh()
        assert ask(encoder, [part(u)], max_tokens=1).status == 200
        encoder.wait_event(u)
        when = r"\d\d-\d\d \d\d:\d\d:\d\d"
        for pattern in (
            rf"^\(EngineCore pid=\d+\) \[vllm-rbln\] DEBUG {when} \[rbln_ec_nixl_connector\.py:\d+\] EC Nixl",
            rf"^\(EngineCore pid=\d+\) INFO {when} \[core\.py:\d+\] init engine",
            rf"^\(APIServer pid=\d+\) INFO {when} \[launcher\.py:\d+\] Available routes",
            r'^\(APIServer pid=\d+\) INFO: +127\.0\.0\.1:\d+ - "POST /v1/chat/completions HTTP/1\.1" 200 OK',
        ):
            assert re.search(pattern, encoder.log(), re.MULTILINE), pattern
        cluster.pd.wait_event(f"received metadata for mm_hash={u}")
        assert ask(cluster.pd, "flush", max_tokens=1).status == 200


def test_two_servers_may_share_a_port(target: Target) -> None:
    """SO_REUSEPORT, as vLLM with several API servers: the second takes a part of the first's connections."""
    first = target.pd(free_port())
    first.wait_ready()
    second = target.launch(
        "pd", "ec_consumer", {"pull_host": "127.0.0.1", "pull_port": free_port()}, port=first.port
    )
    second.wait_log("Application startup complete")
    assert first.alive()
    first.stop()
    assert get(second, "/health").status == 200
    second.stop()

"""Each check by itself, over evidence that says one thing: what it finds, and how bad that is."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eccon import config, launch, scaffold
from eccon.doctor import Evidence, Finding, examine, exit_code
from eccon.doctor.checks import CHECKS
from eccon.doctor.evidence import Clock, Compiled, Host, Launcher, Login, Port
from eccon.doctor.finding import bad, warn
from eccon.model import Npu, NpuContext
from eccon.paths import ClusterPaths
from eccon.signals.devices import Context, Reading

PACKAGES = {
    "vllm": "0.30.0",
    "vllm-rbln": "0.12.0",
    "optimum-rbln": "0.12.1",
    "rebel-compiler": "0.12.0",
    "nixl": "1.5.1",
}
VISUAL: dict[str, Any] = {
    "max_seq_len": [5440],
    "_compile_cfgs": [{"compiled_model_name": "compiled_model", "num_devices": 1}],
}
RBLN: dict[str, Any] = {
    "cls_name": "RBLNQwen3VLForConditionalGenerationConfig",
    "optimum_rbln_version": "0.12.0",
    "batch_size": 8,
    "decoder_batch_sizes": [1, 2, 4, 8],
    "_compile_cfgs": [
        {"compiled_model_name": "prefill", "num_devices": 8},
        {"compiled_model_name": "decoder_batch_8", "num_devices": 8},
    ],
}
FILES = frozenset({"rbln_config.json", "prefill.rbln", "decoder_batch_8.rbln", "visual/compiled_model.rbln"})
COMPILED = Compiled(directory="/m", files=FILES, rbln=RBLN, visual=VISUAL)
LAUNCHER = Launcher(
    command="vllm", processes=("pd", "encoder-0"), path="/v/bin/vllm", python="3.12", packages=PACKAGES,
    imports={"nixl": ""}, ucx=True,
)  # fmt: skip


def npu(index: int, **changes: Any) -> Npu:
    plain: dict[str, Any] = {"device": f"rbln{index}", "index": index, "status": "normal", "pstate": "P14"}
    return Npu(**(plain | {"group": str(index // 8)} | changes))


READING = Reading(kind="rbln", tool="rbln-smi", devices={i: npu(i) for i in range(16)})


@pytest.fixture
def good(tmp_path: Path) -> Evidence:
    """A host on which all is well, and the guide's topology."""
    model = tmp_path / "Qwen3-VL-8B-Instruct"
    model.mkdir()
    (model / "config.json").write_text("{}")
    topology = config.load(scaffold.guide(tmp_path, name="g", model=model.name))
    return of(topology)


def of(topology: config.Topology, **changes: Any) -> Evidence:
    paths = ClusterPaths(Path("/state"), Path("/state"))
    plain: dict[str, Any] = {
        "topology": topology,
        "specs": tuple(launch.everything(topology, paths)),
        "python": "3.11.7",
        "launchers": (LAUNCHER,),
        "compiled": COMPILED,
        "devices": READING,
        "driver": "3.0.0",
        "nodes": frozenset(f"rbln{i}" for i in range(16)),
        "host": Host(
            open_files=(1024, -1), cpus=32, cpus_online=32, shm_bytes=64 * 2**30, shm_free=64 * 2**30,
            state_free=2**40,
        ),
        "clock": Clock(True),
    }  # fmt: skip
    return Evidence(**(plain | changes))


def but(evidence: Evidence, **changes: Any) -> Evidence:
    return msgspec.structs.replace(evidence, **changes)


def with_text(evidence: Evidence, *changes: tuple[str, str]) -> Evidence:
    """The same host with another eccon.toml."""
    text = evidence.topology.path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return of(config.parse(text, evidence.topology.path))


def found(evidence: Evidence) -> dict[str, Finding]:
    """By check, what is not well."""
    return {f.check: f for f in examine(evidence) if f.severity in {"error", "warning"}}


def packages(**changes: str | None) -> tuple[Launcher, ...]:
    rest = {k: v for k, v in PACKAGES.items() if k.replace("-", "_") not in changes}
    new = {k.replace("_", "-"): v for k, v in changes.items() if v is not None}
    return (msgspec.structs.replace(LAUNCHER, packages=rest | new),)


def test_nothing_is_wrong_where_nothing_is(good: Evidence) -> None:
    findings = examine(good)
    assert [f for f in findings if f.severity in {"error", "warning"}] == []
    assert exit_code(findings) == 0
    spoken = {f.check for f in findings}
    assert {"python", "vllm", "pair", "nixl", "guard", "driver", "device-busy", "device-well"} <= spoken
    assert {"model-compiled", "model-devices", "model-version", "model-files", "model-pixels"} <= spoken
    assert {"model-batch", "same-model", "forbidden-flag", "port", "pull-port", "open-files"} <= spoken
    assert {"shm", "cpus", "disk", "clock", "login", "exposed", "connector-bounds"} <= spoken


def test_the_level_of_the_guard_in_each_process(good: Evidence) -> None:
    def told(*guards: tuple[str, str]) -> list[tuple[str, str]]:
        findings = examine(but(good, guards=guards))
        return [(f.severity, f.text.partition(":")[0]) for f in findings if f.check == "guard-level"]

    assert told() == []
    assert told(("pd", "wrap"), ("encoder-0", "wrap"), ("encoder-1", "vendor")) == [
        ("info", "wrap in pd, encoder-0"),
        ("warning", "vendor in encoder-1"),
    ]
    assert told(("pd", "hooks"), ("encoder-0", "off")) == [
        ("warning", "hooks in pd"),
        ("info", "off in encoder-0"),
    ]


def test_an_error_is_told_by_the_exit_code() -> None:
    assert exit_code([warn("a", "b", advice="c")]) == 0
    assert exit_code([warn("a", "b", advice="c"), bad("a", "b", advice="c")]) == 1


@pytest.mark.parametrize(
    ("launchers", "check", "text"),
    [
        ((msgspec.structs.replace(LAUNCHER, path=""),), "vllm", "no such command"),
        ((msgspec.structs.replace(LAUNCHER, python="3.9"),), "python", "runs Python 3.9"),
        ((msgspec.structs.replace(LAUNCHER, python="3.14"),), "python", "runs Python 3.14"),
        (packages(vllm=None), "vllm", "has no vllm in its environment"),
        (packages(vllm_rbln=None), "vllm-rbln", "has no vllm-rbln"),
        (packages(optimum_rbln=None), "vllm-rbln", "has no optimum-rbln"),
        (packages(vllm_rbln="0.10.2"), "vllm-rbln", "vllm-rbln 0.10.2 has no RblnECNixlConnector"),
        (packages(vllm="0.24.0"), "pair", "vllm-rbln 0.12.0 wants vllm 0.30.0, 0.24.0 is there"),
        (packages(optimum_rbln="0.11.0"), "pair", "optimum-rbln 0.11.0 is beside vllm-rbln 0.12.0"),
        (packages(vllm_rbln="0.11.2", vllm="0.24.0", optimum_rbln="0.11.0"), "model-version", "compiled by"),
        (packages(nixl=None), "nixl", "has no nixl"),
        ((msgspec.structs.replace(LAUNCHER, ucx=False),), "nixl", "has no UCX plugin"),
        (
            (msgspec.structs.replace(LAUNCHER, imports={"nixl": "ImportError: libucp.so"}),),
            "nixl",
            "cannot import nixl",
        ),
        ((LAUNCHER, *packages(vllm_rbln="0.11.2", vllm="0.24.0")), "same-version", "vllm 0.24.0 and 0.30.0"),
    ],
)
def test_packages(good: Evidence, launchers: tuple[Launcher, ...], check: str, text: str) -> None:
    finding = found(but(good, launchers=launchers))[check]
    assert text in finding.text
    assert finding.advice


def test_what_another_release_of_vllm_changes_is_told(good: Evidence) -> None:
    assert "vllm-release" not in {f.check for f in examine(good)}
    told = [f for f in examine(but(good, launchers=packages(vllm="0.32.0"))) if f.check == "vllm-release"]
    assert [f.severity for f in told] == ["info"]
    assert "mm_processor_kwargs" in told[0].text


def reading(*devices: Npu, contexts: tuple[Context, ...] = ()) -> Reading:
    rest = {i: npu(i) for i in range(16)} | {d.index: d for d in devices}
    return Reading(kind="rbln", tool="rbln-smi", devices=rest, contexts=contexts)


HELD = Context(of=NpuContext(pid=77, process="VLLM::EngineCore"), devices=frozenset({3}))


@pytest.mark.parametrize(
    ("changes", "check", "text"),
    [
        ({"devices": None, "no_devices": "rbln-smi is not installed"}, "driver", "cannot be looked at"),
        (
            {"devices": Reading(kind="rbln", tool="t", devices={i: npu(i) for i in range(15)})},
            "device-present",
            "encoder-7: device 15 is not there",
        ),
        ({"devices": None, "nodes": frozenset()}, "device-node", "is not there for 0-15"),
        ({"nodes": frozenset(), "refused_nodes": frozenset({"rbln3"})}, "device-node", "opened for 3"),
        ({"devices": reading(npu(2, group="5"))}, "device-group", "pd: its devices are of groups 0, 5"),
        ({"devices": reading(contexts=(HELD,))}, "device-busy", "pd: device 3 is in use"),
        ({"devices": reading(npu(9, pstate="P10"))}, "device-well", "throttled"),
        ({"devices": reading(npu(9, pstate="P12"))}, "device-well", "hangs"),
        ({"devices": reading(npu(9, status="error"))}, "device-well", "rbln9 is error"),
    ],
)
def test_devices(good: Evidence, changes: dict[str, Any], check: str, text: str) -> None:
    assert text in found(but(good, **changes))[check].text


def test_a_device_of_our_own_is_not_busy(good: Evidence) -> None:
    assert found(but(good, devices=reading(contexts=(HELD,)), our_pids=frozenset({77}))) == {}


def compiled(
    rbln: dict[str, Any] | None = None, visual: dict[str, Any] | None = None, **rest: Any
) -> Compiled:
    changed = msgspec.structs.replace(COMPILED, rbln=RBLN | (rbln or {}), visual=VISUAL | (visual or {}))
    return msgspec.structs.replace(changed, **rest)


@pytest.mark.parametrize(
    ("model", "check", "text"),
    [
        (compiled(files=frozenset()), "model-files", "prefill.rbln, decoder_batch_8.rbln"),
        (msgspec.structs.replace(COMPILED, rbln=None), "model-compiled", "it has no rbln_config.json"),
        (compiled({"_meta": {}}), "model-compiled", "legacy"),
        (compiled({"cls_name": "RBLNQwen3VLMoe"}), "model-compiled", "the model is a RBLNQwen3VLMoe"),
        (compiled(faults=("x: not JSON",)), "model-compiled", "cannot be read"),
        (
            compiled({"_compile_cfgs": [{"num_devices": 4}]}),
            "model-devices",
            "pd has 8 devices, the model was",
        ),
        (
            compiled({"_compile_cfgs": [{"tensor_parallel_size": 4}]}),
            "model-devices",
            "pd has 8 devices, the model was compiled for 4",
        ),
        (
            compiled(visual={"_compile_cfgs": [{"num_devices": 2}]}),
            "model-devices",
            "encoder-0 has 1 devices",
        ),
        (compiled({"optimum_rbln_version": "0.11.2"}), "model-version", "compiled by optimum-rbln 0.11.2"),
        (compiled(files=FILES - {"visual/compiled_model.rbln"}), "model-files", "is missing"),
        (
            compiled(visual={"max_seq_len": [1024, 3000]}),
            "model-pixels",
            "is 3136 patches, the visual encoder",
        ),
        (compiled(config={"vision_config": {"patch_size": 8}}), "model-pixels", "is 12544 patches"),
        (compiled({"decoder_batch_sizes": [1, 2]}), "model-batch", "do not fit its batch size"),
        (compiled({"decoder_batch_sizes": [8, 16]}), "model-batch", "do not fit its batch size"),
    ],
)
def test_the_compiled_model(good: Evidence, model: Compiled, check: str, text: str) -> None:
    finding = found(but(good, compiled=model))[check]
    assert text in finding.text
    assert finding.severity == "error"


def test_without_max_pixels_a_large_image_ends_the_encoder(good: Evidence) -> None:
    topology = msgspec.structs.replace(
        good.topology, model=msgspec.structs.replace(good.topology.model, max_pixels=None)
    )
    finding = found(of(topology))["model-pixels"]
    assert finding.advice == "set model.max_pixels to at most 1392640"


def test_old_names_in_a_compiled_model_are_read(good: Evidence) -> None:
    old = {"max_seq_lens": 5440, "_compile_cfgs": [{"tensor_parallel_size": 1}]}
    assert found(but(good, compiled=msgspec.structs.replace(COMPILED, visual=old))) == {}


def test_a_cluster_without_npus_needs_no_compiled_model(good: Evidence) -> None:
    evidence = with_text(good, ('kind = "rbln"', 'kind = "none"'))
    assert {
        c for c in found(but(evidence, compiled=Compiled(directory="/m"))) if c.startswith("model")
    } == set()


@pytest.mark.parametrize(
    ("old", "new", "check", "text"),
    [
        ("# args = []  ", "args = ['--max-num-seqs', '4'] #", "forbidden-flag", "pd is given --max-num-seqs"),
        ("# args = []  ", "args = ['-tp=8'] #", "forbidden-flag", "pd is given -tp"),
        (
            "[encoders]",
            "[encoders]\nargs = ['--mm_processor_cache_gb', '0']",
            "forbidden-flag",
            "encoder-7 is given --mm-processor-cache-gb 0",
        ),
        (
            "[connector]",
            "[connector]\nencoder_extra = { producer_cache_ttl_s = 20 }",
            "connector-bounds",
            "eight images may take 14 s to encode here",
        ),
        (
            "[proxy]",
            "[proxy.settings]\nidentity = 'content'\nunsafe_identity = true\n[proxy]",
            "identity",
            "identity 'content'",
        ),
        ("[connector]", "[connector]\nkind = 'ECExampleConnector'", "connector-bounds", "never removes one"),
        (
            "[connector]",
            "[connector]\nkind = 'ECMooncakeConnector'",
            "connector-parameters",
            "waits for transfer ids",
        ),
        (
            "[connector]",
            "[connector]\nkind = 'ECCPUConnector'",
            "connector-parameters",
            "encodes each image again",
        ),
        ("[connector]", "[connector]\nhost = '0.0.0.0'", "pull-port", "0.0.0.0:19500"),
        ('# profile = "safe"', 'profile = "guide"', "pull-port", "0.0.0.0:19500"),
        ('# profile = "safe"', 'profile = "guide"', "exposed", "9 servers can be reached past the proxy"),
        ("[pd] ", "[pd]\nhost = '10.0.0.1' #", "exposed", "1 servers can be reached"),
        ("port = 19100", "port = 40000", "port-ephemeral", "port 40000 may be given"),
    ],
)
def test_the_topology(good: Evidence, old: str, new: str, check: str, text: str) -> None:
    # Of several findings of a check the last one is looked at.
    assert text in found(with_text(good, (old, new)))[check].text


def test_both_sides_must_be_told_the_same(good: Evidence) -> None:
    def changed(spec: launch.ProcessSpec, old: str, new: str) -> launch.ProcessSpec:
        argv = tuple(w.replace(old, new) for w in spec.argv)
        return msgspec.structs.replace(spec, argv=argv)

    pd, *rest = good.specs
    other = changed(pd, "Qwen3-VL-8B-Instruct", "/abs/Qwen3-VL-8B-Instruct")
    assert "different model strings" in found(but(good, specs=(other, *rest)))["same-model"].text
    other = changed(pd, "802816", "401408")
    assert "different --mm-processor-kwargs" in found(but(good, specs=(other, *rest)))["same-pixels"].text
    # Written in another way it is still the same.
    other = changed(pd, json.dumps({"max_pixels": 802816}), '{"max_pixels":802816}')
    assert "same-pixels" not in found(but(good, specs=(other, *rest)))


@pytest.mark.parametrize(
    ("changes", "check", "text"),
    [
        (
            {"ports": (Port(process="pd", port=19100, holder="port 19100 is held by pid 5 (x)"),)},
            "port",
            "pd: port 19100 is taken",
        ),
        ({"ports": (Port(process="pd", port=19100, listeners=2),)}, "port-twins", "2 processes listen"),
        ({"key_files": {"key": 0o644}}, "secrets", "key can be read by others"),
        (
            {"host": Host(open_files=(100, 1024), shm_bytes=2**35, shm_free=2**35, cpus=99)},
            "open-files",
            "1024",
        ),
        ({"host": Host(open_files=(1, -1), shm_bytes=None, cpus=99)}, "shm", "is not there"),
        ({"host": Host(open_files=(1, -1), shm_bytes=64 * 2**20, cpus=99)}, "shm", "only 64 MiB"),
        ({"host": Host(open_files=(1, -1), shm_bytes=2**35, shm_free=1, cpus=99)}, "shm", "nearly full"),
        ({"host": Host(open_files=(1, -1), shm_bytes=2**35, shm_free=2**35, cpus=4)}, "cpus", "fewer CPUs"),
        (
            {"host": Host(open_files=(1, -1), shm_bytes=2**35, shm_free=2**35, cpus=99, state_free=2**20)},
            "disk",
            "the logs may fill the disk",
        ),
        (
            {"login": Login(session=True, kill_user_processes=True, user="kim")},
            "login",
            "would be ended when you log out",
        ),
        (
            {"login": Login(session=True, kill_user_processes=True, linger=True)},
            "login",
            "ends with it",
        ),
        ({"login": Login(unit="web.service")}, "login", "web.service ends everything"),
    ],
)
def test_the_host(good: Evidence, changes: dict[str, Any], check: str, text: str) -> None:
    finding = found(but(good, **changes))[check]
    assert text in finding.text
    assert finding.advice


def test_log_out_advice_names_the_commands(good: Evidence) -> None:
    login = Login(session=True, kill_user_processes=True, user="kim")
    advice = found(but(good, login=login))["login"].advice
    assert "loginctl enable-linger kim" in advice
    assert "systemd-run --user" in advice


def test_clocks_matter_between_hosts(good: Evidence) -> None:
    alone = but(good, clock=Clock(False))
    assert "clock" not in found(alone)
    text = "[[encoders.override]]\nindex = 0\nexternal = true\nurl = 'http://10.0.0.2:1'\n"
    spread = with_text(good, ("# [proxy.settings]", f"{text}# [proxy.settings]"))
    assert "spans hosts" in found(but(spread, clock=Clock(False)))["clock"].text
    assert found(but(spread, clock=Clock(True))) == {}


def test_every_check_stands_by_itself(good: Evidence) -> None:
    """None of them fails where nothing is known."""
    empty = Evidence(topology=good.topology, specs=(), python="3.11")
    for check in CHECKS:
        for finding in check(empty):
            assert finding.severity in {"ok", "info", "warning", "error"}

"""Evidence from trees that look like a host, and the command on a real cluster."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from eccon import config, launch, scaffold
from eccon.doctor import gather
from eccon.doctor.finding import Finding
from eccon.paths import ClusterPaths
from tests.e2e.cluster import Cluster
from tests.e2e.cluster import cluster as running

PATHS = ClusterPaths(Path("/state"), Path("/state"))

pytestmark = pytest.mark.timeout(400)  # one of them starts a cluster


def model(directory: Path, name: str = "M") -> Path:
    path = directory / name
    (path / "visual").mkdir(parents=True)
    (path / "config.json").write_text('{"vision_config": {"patch_size": 14}}')
    return path


def test_a_model_directory(tmp_path: Path) -> None:
    path = model(tmp_path)
    seen = gather.compiled(path)
    assert (seen.rbln, seen.visual, seen.faults) == (None, {}, ())
    (path / "rbln_config.json").write_text('{"cls_name": "X", "visual": {"max_seq_len": 3}}')
    (path / "visual" / "rbln_config.json").write_text('{"max_seq_len": 5, "_compile_cfgs": [{}]}')
    (path / "visual" / "compiled_model.rbln").write_text("")
    (path / "preprocessor_config.json").write_text("[1]")
    seen = gather.compiled(path)
    assert seen.rbln == {"cls_name": "X", "visual": {"max_seq_len": 3}}
    assert seen.visual["max_seq_len"] == 5
    assert seen.config["vision_config"]["patch_size"] == 14
    assert "visual/compiled_model.rbln" in seen.files
    assert seen.faults == (f"{path / 'preprocessor_config.json'}: is not a JSON object",)
    (path / "rbln_config.json").write_text('{"visual": {"_compile_cfgs": [{}], "max_seq_len": 7}}')
    assert gather.compiled(path).visual["max_seq_len"] == 7


@pytest.fixture
def topology(tmp_path: Path) -> config.Topology:
    """With a vllm of an environment of its own, whose interpreter is this one."""
    model(tmp_path, "Qwen3-VL-8B-Instruct")
    home = tmp_path / "venv"
    command = home / "bin" / "vllm"
    command.parent.mkdir(parents=True)
    interpreter = home / "bin" / "python"
    # Not a link: the interpreter of a link would know this environment's packages.
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    interpreter.chmod(0o755)
    command.write_text(f"#!{interpreter}\n")
    command.chmod(0o755)
    site = home / "lib" / "python3.12" / "site-packages"
    for info in ("vllm-0.30.0", "Vllm_Rbln-0.12.0", "optimum.rbln-0.12.0", "nixl-1.5.1"):
        (site / f"{info}.dist-info").mkdir(parents=True)
    (site / "nixl_cu12.libs" / "nixl").mkdir(parents=True)
    (site / "nixl_cu12.libs" / "nixl" / "libplugin_UCX.so").write_text("")
    path = scaffold.guide(tmp_path, name="g", model="Qwen3-VL-8B-Instruct")
    path.write_text(path.read_text().replace('vllm = "vllm"', 'vllm = "venv/bin/vllm"', 1))
    return config.load(path)


def test_a_launcher_is_read_without_running_it(topology: config.Topology) -> None:
    [seen] = gather.launchers(topology)
    assert seen.packages == {
        "vllm": "0.30.0",
        "vllm-rbln": "0.12.0",
        "optimum-rbln": "0.12.0",
        "nixl": "1.5.1",
    }
    assert (seen.python, seen.ucx, seen.processes[0], len(seen.processes)) == ("3.12", True, "pd", 9)
    assert seen.imports["nixl"].startswith("ModuleNotFoundError")


def test_an_import_that_crashes_or_succeeds_is_told(topology: config.Topology) -> None:
    module = topology.directory / "venv" / "nixl.py"
    interpreter = topology.directory / "venv" / "bin" / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={module.parent} exec {sys.executable} -S "$@"\n')
    module.write_text("print('noise')\n")
    assert next(iter(gather.launchers(topology))).imports == {"nixl": ""}
    module.write_text("import os\nos.abort()\n")
    assert next(iter(gather.launchers(topology))).imports == {"nixl": "the interpreter ended"}
    module.write_text("raise RuntimeError('no driver')\n")
    assert next(iter(gather.launchers(topology))).imports == {"nixl": "RuntimeError: no driver"}


def test_a_command_that_is_not_there(topology: config.Topology) -> None:
    missing = msgspec.structs.replace(topology, launcher=config.Launcher(vllm="no-such-vllm"))
    [seen] = gather.launchers(missing)
    assert (seen.path, seen.packages) == ("", {})


def test_who_holds_a_port_and_whether_it_is_ours(topology: config.Topology) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        spec = msgspec.structs.replace(launch.pd(topology, PATHS), ports=(s.getsockname()[1],))
        [seen] = gather.port_holders([spec], frozenset())
        assert f"is held by pid {os.getpid()}" in seen.holder
        [seen] = gather.port_holders([spec], frozenset({os.getpid()}))
        assert (seen.holder, seen.listeners) == ("", 1)
    assert list(gather.port_holders([spec], frozenset())) == []


def test_two_servers_on_one_port_are_seen(topology: config.Topology) -> None:
    program = (
        "import socket, sys\ns = socket.socket()\ns.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "s.bind(('127.0.0.1', int(sys.argv[1])))\ns.listen()\nprint('on', flush=True)\nsys.stdin.read()\n"
    )
    with socket.socket() as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        ours.bind(("127.0.0.1", 0))
        ours.listen()
        port = ours.getsockname()[1]
        with subprocess.Popen(
            [sys.executable, "-c", program, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout
            other.stdout.readline()
            spec = msgspec.structs.replace(launch.pd(topology, PATHS), ports=(port,))
            [seen] = gather.port_holders([spec], frozenset({os.getpid()}))
            other.communicate()
        assert seen.listeners == 2
        assert f"pid {other.pid}" in seen.holder


@pytest.mark.parametrize(
    ("group", "session", "unit"),
    [
        ("0::/user.slice/user-1000.slice/session-7.scope", True, ""),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-u3.scope", False, ""),
        ("0::/system.slice/web.service", False, "web.service"),
        ("0::/", False, ""),
    ],
)
def test_the_session_that_a_daemon_runs_in(tmp_path: Path, group: str, session: bool, unit: str) -> None:
    proc, etc, lingers = tmp_path / "proc", tmp_path / "etc", tmp_path / "linger"
    (proc / "5").mkdir(parents=True)
    (proc / "5" / "cgroup").write_text(f"{group}\n")
    (etc / "logind.conf.d").mkdir(parents=True)
    (etc / "logind.conf").write_text("[Login]\n#KillUserProcesses=no\nKillUserProcesses=no\n")
    (etc / "logind.conf.d" / "50.conf").write_text("[Login]\nKillUserProcesses = yes\n")
    seen = gather.login(5, proc=proc, etc=etc, lingers=lingers)
    assert (seen.session, seen.unit) == (session, unit)
    assert (seen.kill_user_processes, seen.linger) == (True, False)
    lingers.mkdir()
    (lingers / seen.user).write_text("")
    assert gather.login(5, proc=proc, etc=etc, lingers=lingers).linger


def test_this_host_is_seen_as_it_is(tmp_path: Path) -> None:
    seen = gather.host(ClusterPaths(tmp_path / "not" / "yet", tmp_path))
    assert seen.cpus == len(os.sched_getaffinity(0))
    assert seen.state_free
    assert seen.ephemeral[0] < seen.ephemeral[1]
    assert gather.clock().synchronised in {True, False, None}


def doctor(directory: Path, *argv: str, **env: str) -> tuple[int, list[Finding]]:
    command = [sys.executable, "-m", "eccon", "doctor", "--json", *argv]
    base = {k: v for k, v in os.environ.items() if not k.startswith("ECCON")}
    done = subprocess.run(command, cwd=directory, env=base | env, capture_output=True, text=True, timeout=110)
    assert done.stdout, done.stderr
    return done.returncode, msgspec.json.decode(done.stdout, type=list[Finding])


def test_devices_by_the_vendors_tool(topology: config.Topology, tmp_path: Path) -> None:
    devices = [
        {"npu": i % 8, "device": f"rbln{i}", "status": "normal", "pstate": "P14", "group_id": str(i // 8)}
        for i in range(15)
    ]
    context = {"npu": 3, "device": "rbln3", "pid": "1", "process": "VLLM::EngineCore"}
    tool = tmp_path / "tools" / "rbln-smi"
    tool.parent.mkdir()
    said = json.dumps({"KMD_version": "3.0.0", "devices": devices, "contexts": [context]})
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    code, findings = doctor(topology.directory, PATH=path, ECCON_STATE_DIR=str(tmp_path))
    errors = {f.check: f for f in findings if f.severity == "error"}
    assert code == 1
    assert errors["device-present"].text == "encoder-7: device 15 is not there"
    assert errors["device-busy"].evidence == "pid 1 (VLLM::EngineCore)"
    assert errors["model-compiled"].advice == "compile it: `eccon compile`"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running(3) as found:
        found.eccon("up", timeout=110)
        yield found


def test_a_tiny_image_goes_through_every_encoder(cluster: Cluster) -> None:
    code, findings = doctor(cluster.directory, "--smoke", ECCON_STATE_DIR=str(cluster.directory))
    by_check = {check: [f for f in findings if f.check == check] for check in ("smoke-image", "port")}
    assert [f.text for f in by_check["smoke-image"]] == [
        f"an image went through encoder-{i}" for i in range(3)
    ]
    assert {f.severity for f in by_check["smoke-image"]} == {"ok"}
    assert [f.severity for f in by_check["port"]] == ["ok"]
    assert code == int(any(f.severity == "error" for f in findings))


def test_without_a_cluster_there_is_nothing_to_smoke(tmp_path: Path) -> None:
    scaffold.demo(tmp_path, name="t", ports=scaffold.free_ports(4))
    command = [sys.executable, "-m", "eccon", "doctor", "--smoke"]
    env = {**os.environ, "ECCON_STATE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, "no daemon answers" in done.stderr) == (3, True)

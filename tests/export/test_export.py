"""Exported launchers and units: checked by the tools that read them, and the launchers really run."""

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from eccon import config, export, launch, prompt, scaffold
from eccon.paths import ClusterPaths
from eccon.scripts.reader import read
from tests.e2e.cluster import FAST

T = TypeVar("T")


def until(probe: Callable[[], T | None], what: str, seconds: float = 60.0) -> T:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := probe():
            return found
        time.sleep(0.05)
    msg = f"not within {seconds:g} s: {what}"
    raise AssertionError(msg)


@pytest.fixture
def guide(tmp_path: Path) -> config.Topology:
    """The guide's topology, with words that a shell or systemd would take apart if they could."""
    vllm = tmp_path / "bin dir" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text("#!/bin/sh\n")
    vllm.chmod(0o755)
    model = tmp_path / "a $HOME; %i `m`"
    model.mkdir()
    (model / "config.json").write_text("{}")
    path = scaffold.guide(tmp_path, name="g", model=model.name)
    text = path.read_text().replace('vllm = "vllm"', f'vllm = "{vllm}"', 1)
    path.write_text(text + '[env]\nHF_TOKEN = "a$b\\"c"\nODD = "it\'s 5%"\n')
    return config.load(path)


def specs(topology: config.Topology, directory: Path) -> list[launch.ProcessSpec]:
    return launch.everything(topology, ClusterPaths(directory, directory))


def serve(topology: config.Topology, directory: Path) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    return [(s.argv, s.env) for s in specs(topology, directory) if "serve" in s.argv]


def test_the_launchers_start_exactly_what_the_daemon_starts(guide: config.Topology, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    export.write(directory, export.scripts(guide, directory))
    started = []
    for name in ("serve_ec_llm.sh", "serve_ec_encoder.sh"):
        subprocess.run(["bash", "-n", str(directory / name)], check=True)
        found, _ = read(directory / name, {})
        started += [(tuple(c.argv[1:]), c.env) for c in found if "serve" in c.argv]
    wanted = [(argv, env) for argv, env in serve(guide, directory)]
    secrets = dict(line.split("=", 1) for line in (directory / "secrets.env").read_text().splitlines())
    assert list(secrets) == ["HF_TOKEN"]
    for (argv, env), (its_argv, its_env) in zip(wanted, started, strict=True):
        assert argv == its_argv
        assert env == its_env | {"HF_TOKEN": 'a$b"c'}
    assert stat.S_IMODE((directory / "secrets.env").stat().st_mode) == 0o600
    assert "a$b" not in "".join(p.read_text() for p in directory.iterdir() if p.name != "secrets.env")


def test_the_launchers_satisfy_shellcheck(guide: config.Topology, tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    directory = tmp_path / "out"
    export.write(directory, export.scripts(guide, directory))
    files = [str(p) for p in directory.glob("*.sh")]
    subprocess.run(["shellcheck", "--severity=warning", *files], check=True)


def test_units_keep_what_lives_and_order_the_pd_first(guide: config.Topology, tmp_path: Path) -> None:
    directory = tmp_path / "units"
    export.write(directory, export.units(guide, directory))
    unit = {p.stem: p.read_text() for p in directory.glob("*.service")}
    assert len(unit) == 10
    for text in unit.values():
        assert "\nKillMode=process\n" in text
        assert "\nDelegate=yes\n" in text
        assert f"\nEnvironmentFile={directory}/secrets.env\n" in text
        assert "HF_TOKEN" not in text
    assert "\nAfter=eccon-g-pd.service\n" in unit["eccon-g-encoder-7"]
    assert "\nExecStartPost=:" in unit["eccon-g-pd"]
    assert "After=" not in unit["eccon-g-proxy"]
    assert "\nUnsetEnvironment=RBLN_VISIBLE_DEVICES\n" in unit["eccon-g-pd"]
    assert stat.S_IMODE((directory / "secrets.env").stat().st_mode) == 0o600
    start = re.search(r"^ExecStart=:(.*)$", unit["eccon-g-pd"], re.MULTILINE)
    assert start
    words = [w.replace("%%", "%") for w in shlex.split(start[1])]
    # In double quotes both take a backslash before a quote or another only.
    assert tuple(words) == specs(guide, directory)[0].argv
    target = (directory / "eccon-g.target").read_text()
    assert "eccon-g-pd.service" in target
    assert all(f"eccon-g-encoder-{i}.service" in target for i in range(8))


def test_pins_and_limits_go_along(guide: config.Topology, tmp_path: Path) -> None:
    text = guide.path.read_text().replace("[pd] ", "[pd]\ncpus = '0-1,4' #")
    text = text.replace(
        "[supervisor]", "[supervisor]\nlimits = { files = 70000, core_bytes = 0, locked_bytes = -1 }"
    )
    pinned = config.parse(text, guide.path)
    unit = {f.name: f.text for f in export.units(pinned, tmp_path)}["eccon-g-pd.service"]
    for line in ("CPUAffinity=0 1 4", "LimitNOFILE=70000", "LimitCORE=0", "LimitMEMLOCK=infinity"):
        assert f"\n{line}\n" in unit
    script = {f.name: f.text for f in export.scripts(pinned, tmp_path)}["serve_ec_llm.sh"]
    assert "exec taskset -c 0,1,4 " in script
    assert "\nulimit -n 70000\nulimit -c 0\nulimit -l unlimited\n" in script


def test_units_satisfy_systemd(guide: config.Topology, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    directory = tmp_path / "units"
    written = export.write(directory, export.units(guide, directory))
    units = [str(p) for p in written if p.suffix in {".service", ".target"}]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", *units],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_UNIT_PATH": f"{directory}:"},
        capture_output=True,
        text=True,
    )
    ours = [line for line in done.stderr.splitlines() if "eccon" in line]
    assert ours == [], done.stderr


def test_a_command_that_is_not_there_is_refused_for_units(guide: config.Topology, tmp_path: Path) -> None:
    text = guide.path.read_text().replace(guide.launcher.vllm, "no-such-vllm")
    with pytest.raises(export.ExportError, match="no-such-vllm: no such command on this host"):
        export.units(config.parse(text, guide.path), tmp_path)


def test_what_is_there_is_left_unless_forced(tmp_path: Path) -> None:
    files = [export.File("a", "1"), export.File("b", "2", 0o600)]
    export.write(tmp_path, files)
    with pytest.raises(export.ExportError, match="is there already"):
        export.write(tmp_path, [export.File("c", "3"), *files])
    assert not (tmp_path / "c").exists()
    export.write(tmp_path, [export.File("a", "9")], force=True)
    assert (tmp_path / "a").read_text() == "9"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_what_a_killed_server_leaves_is_swept(guide: config.Topology, tmp_path: Path) -> None:
    export.write(tmp_path / "units", export.units(guide, tmp_path / "units"))
    group = tmp_path / "group"
    group.mkdir()
    ignore = "import signal; signal.signal(15, signal.SIG_IGN);"
    wait = "import time; print(1, flush=True); time.sleep(600)"
    meek = subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE)
    hard = subprocess.Popen([sys.executable, "-c", ignore + wait], stdout=subprocess.PIPE)
    for p in (meek, hard):
        assert p.stdout
        p.stdout.readline()
    (group / "cgroup.procs").write_text(f"{meek.pid}\n{hard.pid}\n")
    try:
        sweep = subprocess.Popen([str(tmp_path / "units" / "sweep.sh"), str(group)])
        # In a real control group those that ended are gone from the list.
        assert meek.wait(30) == -signal.SIGTERM
        (group / "cgroup.procs").write_text(f"{hard.pid}\n")
        assert hard.wait(60) == -signal.SIGKILL
        (group / "cgroup.procs").write_text("")
        assert sweep.wait(30) == 0
    finally:
        for p in (meek, hard):
            p.kill()
            p.wait()
            if p.stdout:
                p.stdout.close()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[tuple[config.Topology, subprocess.Popen[bytes]]]:
    ports = scaffold.free_ports(2)
    topology = config.load(scaffold.demo(tmp_path, name="t", encoders=2, ports=ports))
    directory = tmp_path / "out dir"
    export.write(directory, export.scripts(topology, directory))
    env = {**os.environ, **FAST, "XDG_STATE_HOME": str(tmp_path / "state")}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([str(directory / "serve_ec_all.sh")], env=env, stdout=log, stderr=log)
    tree = []
    try:
        yield topology, process
        tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    finally:
        process.terminate()
        process.wait(60)
        _, left = psutil.wait_procs(tree, timeout=30)
        # What this machine's first process does not reap is dead all the same.
        alive = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        for p in alive:
            p.kill()
        assert alive == []


def test_the_launchers_run(demo: tuple[config.Topology, "subprocess.Popen[bytes]"]) -> None:
    topology, process = demo
    url = f"http://127.0.0.1:{topology.proxy.port}"

    def ready() -> bool:
        assert process.poll() is None
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                return bool(json.load(answer).get("encode_cluster") == "healthy")
        except OSError:
            return False

    until(ready, "the proxy says that all are well")
    images = [str(p) for p in prompt.samples()[:2]]
    body = prompt.build(topology.model.path, "What is there?", images, stream=False)
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    assert "image 2" in said.lower()


def test_the_commands(tmp_path: Path) -> None:
    scaffold.demo(tmp_path, name="t", encoders=2)

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "eccon", "export", *argv]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = run("scripts")
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "export" / "scripts" / "serve_ec_llm.sh") in done.stdout.splitlines()
    assert run("scripts").returncode == 1
    assert run("scripts", "--force").returncode == 0
    done = run("systemd", "-o", "units", "--system", "--user", "svc")
    assert "\nUser=svc\n" in (tmp_path / "units" / "eccon-t-pd.service").read_text()
    assert "systemctl enable --now eccon-t.target" in done.stderr

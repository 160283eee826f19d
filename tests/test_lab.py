"""The lab's pure parts and its commands; the lab itself is tested by `tests/contract --target lab`."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from eccon import config
from eccon.lab import about, cluster, pins, python, standins
from eccon.lab.failure import CheckError, RegistryError, SetupError
from eccon.lab.pip import Pip, cuda_reason, requirements
from eccon.lab.place import Place, default
from lab import guide
from lab.table import table
from lab.world import Outcome


def eccon(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eccon", *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


@pytest.fixture
def made(tmp_path: Path) -> Place:
    """As setup leaves it, as far as the configuration looks."""
    place = Place(tmp_path / "a lab")
    place.model.mkdir(parents=True)
    (place.model / "config.json").write_text("{}")
    place.vllm.parent.mkdir(parents=True)
    place.vllm.touch(0o755)
    place.config.write_text(cluster.config(place))
    place.record.write_text(json.dumps({"steps": {"config": "x"}}))
    return place


def test_its_configuration_is_one_of_ours(made: Place) -> None:
    topology = config.load(made.config)
    assert topology.name == "lab"
    assert topology.launcher.vllm == str(made.vllm)
    assert topology.connector.kind == "RblnECNixlConnector"
    assert topology.encoders.count == 2
    assert topology.pd.args == list(cluster.FLAGS)
    assert topology.env == cluster.environment(made)
    assert topology.env["UCX_TLS"] == "tcp,shm,self"


def test_another_connector_is_one_line_away(made: Place) -> None:
    text = made.config.read_text()
    made.config.write_text(text.replace('\nkind = "RblnECNixlConnector"', '\nkind = "ECExampleConnector"'))
    assert config.load(made.config).connector.kind == "ECExampleConnector"


def test_a_lab_half_made_is_none(made: Place) -> None:
    assert made.ready()
    made.record.write_text("{")
    assert not made.ready()
    made.record.unlink()
    assert not made.ready()


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ECCON_LAB", str(tmp_path))
    assert default() == tmp_path
    monkeypatch.delenv("ECCON_LAB")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default() == tmp_path / "eccon" / "lab"


def test_what_is_taken_over_of_vllms_requirements() -> None:
    stated = [
        "regex",
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchaudio",
        "torchvision; platform_machine != 's390x'",
        "Torch_Codec>=1",
        "torchcodec>=0.14",
        "mistral_common[image]>=1.11.6",
        "pandas; extra == 'bench'",
        'scipy; extra == "bench"',
    ]
    assert requirements(stated) == ["regex", "Torch_Codec>=1", "mistral_common[image]>=1.11.6"]


@pytest.mark.parametrize(
    ("version", "needs", "reason"),
    [
        ("2.13.0+cpu", ["filelock"], ""),
        ("2.13.0", ["filelock", "sympy"], ""),
        ("2.13.0+cu130", [], "version 2.13.0+cu130"),
        ("2.13.0+rocm7", [], "version 2.13.0+rocm7"),
        (
            "2.13.0",
            ["sympy", "nvidia-cublas==13.0; platform_system == 'Linux'"],
            "it requires nvidia-cublas==13.0",
        ),
        ("2.13.0", ["cuda-bindings>=13"], "it requires cuda-bindings>=13"),
        ("2.13.0", ["nvidia-x; extra == 'gpu'"], ""),
    ],
)
def test_a_cuda_build_is_told_from_its_metadata(version: str, needs: list[str], reason: str) -> None:
    report: dict[str, object] = {"install": [{"metadata": {"version": version, "requires_dist": needs}}]}
    assert cuda_reason(report) == reason


@pytest.mark.parametrize("report", [{}, {"install": []}, {"install": None}, {"install": [{"metadata": 1}]}])
def test_a_report_without_torch_says_nothing(report: dict[str, object]) -> None:
    assert cuda_reason(report) == ""


def _wheel(directory: Path, *needs: str) -> None:
    """A torch of the pinned version that is nothing but metadata."""
    import zipfile

    name = f"torch-{pins.TORCH}"
    metadata = [
        f"Metadata-Version: 2.1\nName: torch\nVersion: {pins.TORCH}",
        *(f"Requires-Dist: {n}" for n in needs),
    ]
    with zipfile.ZipFile(directory / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.dist-info/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(
            f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{name}.dist-info/RECORD", "")


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip without anything that this machine has told it."""
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.mark.usefixtures("no_index")
@pytest.mark.parametrize("needs", [(), ("nvidia-cublas==13.0",)], ids=["cpu", "cuda"])
def test_setup_looks_at_torch_before_it_installs_it(tmp_path: Path, needs: tuple[str, ...]) -> None:
    """With the real pip of this environment, on a directory of wheels."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    _wheel(tmp_path, *needs)
    pip = Pip(venv, tmp_path / "log", [f"--find-links={tmp_path}"])
    said: list[str] = []
    if needs:
        with pytest.raises(
            RegistryError, match=r"CUDA build \(it requires nvidia-cublas==13.0\)[^$]*--find-links"
        ):
            pip.refuse_cuda(f"torch=={pins.TORCH}", said.append)
    else:
        pip.refuse_cuda(f"torch=={pins.TORCH}", said.append)
    with pytest.raises(RegistryError, match="No matching distribution"):
        pip.refuse_cuda("torch==0.0.1", said.append)


def test_a_python_that_does_not_fit(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 3 9\n")
    old.chmod(0o755)
    with pytest.raises(CheckError, match=r"needs Python 3\.10 to 3\.13 .* is 3\.9\."):
        python.choose(str(old))
    with pytest.raises(CheckError, match="cannot be run"):
        python.choose(str(tmp_path / "none"))
    old.write_text("#!/bin/sh\necho \"No module named 'ensurepip'\" >&2\nexit 1\n")
    with pytest.raises(CheckError, match=r"lacks something .*ensurepip"):
        python.choose(str(old))
    old.write_text("#!/bin/sh\necho 3 12\n")
    assert python.choose(str(old)) == old


def test_stand_ins_are_put_in_once(tmp_path: Path) -> None:
    vision, nixl = tmp_path / "torchvision/_meta_registrations.py", tmp_path / "nixl_cu12/_api.py"
    for file, text in (
        (vision, "import torch\nimport torchvision.extension  # noqa: F401\nrest = 1\n"),
        (nixl, "def f(agent_config):\n    agent_config.pthrDelay = 0\n    return agent_config\n"),
    ):
        file.parent.mkdir()
        file.write_text(text)
    (tmp_path / "vllm-0.1+cpu.dist-info").mkdir()
    standins.apply(tmp_path, "0.30.0")
    once = (vision.read_text(), nixl.read_text())
    standins.apply(tmp_path, "0.30.0")
    assert (vision.read_text(), nixl.read_text()) == once
    for file in (vision, nixl, tmp_path / "rebel/kv_cache/__init__.py"):
        compile(file.read_text(), str(file), "exec")
    assert [d.name for d in tmp_path.glob("vllm-*")] == ["vllm-0.30.0+cpu.dist-info"]

    scope: dict[str, object] = {}
    exec(nixl.read_text(), scope)  # noqa: S102
    agent = type("Agent", (), {})
    for value, delay in (("1000", 1000), ("", 0)):
        os.environ[standins.NIXL_DELAY] = value
        try:
            assert vars(scope["f"](agent))["pthrDelay"] == delay  # type: ignore[operator]
        finally:
            del os.environ[standins.NIXL_DELAY]


def test_a_release_that_looks_different_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/_meta_registrations.py").write_text("import torch\n")
    with pytest.raises(SetupError, match="not as in the release"):
        standins.apply(tmp_path, "0.30.0")


def test_lab_says_what_is_real(tmp_path: Path) -> None:
    done = eccon("lab", ECCON_LAB=str(tmp_path))
    assert done.returncode == 0
    assert about.text() in done.stdout
    assert "vllm serve 0.30.0" in done.stdout
    assert "eccon lab setup" in done.stdout
    assert not any(tmp_path.iterdir())


def test_a_lab_of_another_release_says_so(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text(json.dumps({"vllm": "0.32.0", "steps": {}}))
    said = eccon("lab", ECCON_LAB=str(tmp_path)).stdout
    assert "vllm serve 0.32.0" in said
    assert "is not around it unless" in said


@pytest.mark.parametrize("args", [("lab", "up"), ("lab", "down"), ("demo", "--lab", "--headless", "--once")])
def test_without_a_lab_the_way_to_one_is_told(tmp_path: Path, args: tuple[str, ...]) -> None:
    done = eccon(*args, ECCON_LAB=str(tmp_path), TMPDIR=str(tmp_path))
    assert done.returncode == 2
    assert f"no lab in {tmp_path}" in done.stderr
    assert not any(tmp_path.iterdir())


def test_setup_that_cannot_begin_makes_nothing(tmp_path: Path) -> None:
    done = eccon("lab", "setup", "--dir", str(tmp_path / "x"), "--python", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "cannot be run" in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("no_index")
def test_setup_without_a_registry_says_so_by_its_code(tmp_path: Path) -> None:
    done = eccon("lab", "setup", "--dir", str(tmp_path / "x"), "--find-links", str(tmp_path))
    assert done.returncode == 5, done.stderr
    assert "No matching distribution found for torch" in done.stderr
    assert json.loads((tmp_path / "x" / "lab.json").read_text())["steps"].keys() == {"venv"}


def test_the_guides_proxy_is_found_in_its_text(tmp_path: Path) -> None:
    text = tmp_path / "guide.md"
    script = '#!/usr/bin/env python3\n"""A proxy."""\n# A comment.\nF = "--decode-servers-urls"\n'
    text.write_text(f"4.4 Start\n\n#!/usr/bin/env bash\ntrue\n\n4.5 Proxy\n\n{script}\n4.6 Send\n\ncurl x\n")
    assert guide.extract(text, tmp_path / "proxy.py").read_text().strip() == script.strip()
    text.write_text("nothing of the kind")
    with pytest.raises(ValueError, match="holds no proxy script"):
        guide.extract(text, tmp_path / "proxy.py")


def test_the_table_counts_what_the_runs_saw(tmp_path: Path) -> None:
    died = Outcome(failed=1, pd_died=True, innocent_s=29.4, innocent_failed=True)
    runs = {
        "guide": {
            "part-without-type": died,
            "chat-goes-on": Outcome(answered=8, wrong=2),
            "encoder-hangs": Outcome(failed=4, waited_s=75),
        },
        "eccon": {
            "part-without-type": Outcome(answered=1),
            "encoder-hangs": Outcome(answered=4),
            "encoder-full": Outcome(answered=3, refused=1),
        },
    }
    files = []
    for front, faults in runs.items():
        files.append(tmp_path / f"{front}.json")
        content = {"front": front, "faults": {name: asdict(outcome) for name, outcome in faults.items()}}
        files[-1].write_text(json.dumps(content))
    assert table(files).splitlines() == [
        "| | the guide's proxy | eccon-proxy |",
        "|---|---|---|",
        "| an image part without `type` | **PD dies**, all stall 29 s, 1 of 1 failed | answered |",
        "| an image sent again after three others | **2 wrong**, 8 of 10 answered | – |",
        "| more items at once than an encoder keeps | – | 1 of 4 refused, 3 of 4 answered |",
        "| an idle encoder stops answering | 4 of 4 failed after 75 s | answered |",
        "| **PD deaths** | **1** of 3 | **0** of 3 |",
        "| **stalls of others** | **1** of 3 | **0** of 3 |",
        "| **wrong answers** | **2** | **0** |",
    ]

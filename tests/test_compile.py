"""`eccon compile` in an environment whose optimum.rbln takes what its version takes, and compiles nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from eccon import config, scaffold
from eccon.launch import compile as compiling
from eccon.launch import versions

OPTIMUM = '''\
"""Takes what optimum-rbln VERSION takes, and writes what it writes, without its graphs' contents."""
import json, os, pathlib, sys, time
VERSION = "@VERSION@"
new = [int(n) for n in VERSION.split(".")]
WHOLE = {"visual", "max_seq_len", "batch_size", "decoder_batch_sizes", "tensor_parallel_size"}
VISUAL = {"tensor_parallel_size", "max_seq_len" if new >= [0, 10, 4] else "max_seq_lens"}
if new >= [0, 12]:
    WHOLE |= {"num_devices"}
    VISUAL |= {"num_devices"}

class RBLNQwen3VLForConditionalGeneration:
    @classmethod
    def from_pretrained(cls, model_id, export, rbln_config):
        for allowed, given in ((WHOLE, rbln_config), (VISUAL, rbln_config["visual"])):
            if unexpected := set(given) - allowed:
                raise ValueError(f"Unexpected arguments: {unexpected}")
        print("compiling", model_id, flush=True)
        if os.environ.get("SLOW"):
            pathlib.Path("begun").write_text(str(os.getpid()))
            time.sleep(600)
        self = cls()
        self.config = rbln_config
        return self

    def save_pretrained(self, target):
        target = pathlib.Path(target)
        (target / "visual").mkdir(parents=True)
        def graphs(config, *names):
            count = config.get("num_devices", config.get("tensor_parallel_size"))
            return [{"compiled_model_name": n, "num_devices": count} for n in names]
        config = self.config | {"cls_name": "RBLNQwen3VLForConditionalGenerationConfig"}
        config |= {"optimum_rbln_version": VERSION}
        names = [f"decoder_batch_{b}" for b in config["decoder_batch_sizes"]]
        config["_compile_cfgs"] = graphs(self.config, "prefill", *names)
        visual = self.config["visual"]
        config["visual"] = visual | {"_compile_cfgs": graphs(visual, "compiled_model")}
        (target / "config.json").write_text("{}")
        (target / "rbln_config.json").write_text(json.dumps(config))
        lost = os.environ.get("LOSE")
        for name in ("prefill", *names, "visual/compiled_model"):
            if name != lost:
                (target / f"{name}.rbln").write_text("")
'''


@pytest.fixture
def environment(tmp_path: Path) -> Callable[[str], None]:
    """Makes `venv` with that version of optimum-rbln."""

    def make(version: str) -> None:
        home = tmp_path / "venv"
        site = home / "lib" / "python3.12" / "site-packages"
        for info in (f"optimum_rbln-{version}", f"vllm_rbln-{version}", "vllm-0.30.0"):
            (site / f"{info}.dist-info").mkdir(parents=True)
        (site / "optimum" / "rbln").mkdir(parents=True)
        (site / "optimum" / "rbln" / "__init__.py").write_text(OPTIMUM.replace("@VERSION@", version))
        (home / "bin").mkdir()
        python, vllm = home / "bin" / "python", home / "bin" / "vllm"
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
        vllm.write_text(f"#!{python}\n")
        for file in (python, vllm):
            file.chmod(0o755)

    path = scaffold.guide(tmp_path, name="g", model="Qwen3-VL-8B-Instruct")
    text = path.read_text().replace('vllm = "vllm"', 'vllm = "venv/bin/vllm"', 1)
    path.write_text(text.replace("# decoder_batch_sizes = []", "decoder_batch_sizes = [1, 2, 4, 8]"))
    return make


def run(directory: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eccon", "compile", *argv]
    base = {k: v for k, v in os.environ.items() if not k.startswith("ECCON")}
    return subprocess.run(command, cwd=directory, env=base | env, capture_output=True, text=True, timeout=100)


def rbln_config(directory: Path) -> dict[str, Any]:
    path = directory / "Qwen3-VL-8B-Instruct" / "rbln_config.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(
    ("version", "size", "devices"),
    [
        ("0.10.3", "max_seq_lens", "tensor_parallel_size"),
        ("0.11.2", "max_seq_len", "tensor_parallel_size"),
        ("0.12.0", "max_seq_len", "num_devices"),
    ],
)
def test_the_installed_version_gets_its_own_words(
    environment: Callable[[str], None], tmp_path: Path, version: str, size: str, devices: str
) -> None:
    environment(version)
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/Qwen3-VL-8B-Instruct\n"), done.stderr
    assert "compiling Qwen/Qwen3-VL-8B-Instruct" in done.stderr
    made = rbln_config(tmp_path)
    assert (made[devices], made["visual"][size], made["decoder_batch_sizes"]) == (8, 5440, [1, 2, 4, 8])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["Qwen3-VL-8B-Instruct", "eccon.toml", "venv"]
    # And the cluster's configuration is good now.
    assert config.load(tmp_path / "eccon.toml").model.path == "Qwen3-VL-8B-Instruct"


def test_a_dry_run_prints_the_guides_script(environment: Callable[[str], None], tmp_path: Path) -> None:
    environment("0.10.3")
    done = run(tmp_path, "--dry-run")
    made: list[Any] = []

    class Model:
        @staticmethod
        def from_pretrained(*args: Any, **kwargs: Any) -> "Model":
            made.append((args, kwargs))
            return Model()

        @staticmethod
        def save_pretrained(target: str) -> None:
            made.append(target)

    first, _, rest = done.stdout.partition("\n")
    assert first == f"from optimum.rbln import {compiling.CLASS}"
    exec(rest, {compiling.CLASS: Model})  # noqa: S102  our own script is what is tested
    options = {
        "visual": {"max_seq_lens": 5440, "tensor_parallel_size": 1},
        "tensor_parallel_size": 8,
        "max_seq_len": 32768,
        "batch_size": 8,
        "decoder_batch_sizes": [1, 2, 4, 8],
    }
    guide = (("Qwen/Qwen3-VL-8B-Instruct",), {"export": True, "rbln_config": options})
    assert made == [guide, "Qwen3-VL-8B-Instruct"]
    assert not (tmp_path / "Qwen3-VL-8B-Instruct").exists()


def test_strange_names_stay_words(environment: Callable[[str], None], tmp_path: Path) -> None:
    path = tmp_path / "eccon.toml"
    path.write_text(
        path.read_text() + "extra = { use_inputs_embeds = true, note = 'a\"b' }\nsource = '''x'\\y'''\n"
    )
    topology = config.load(path, compiled=False)
    script = compiling.script(topology, versions.profile("0.12.0"), "t")
    assert '"use_inputs_embeds": True' in script
    compile(script, "script", "exec")


def test_a_model_that_is_there_is_kept(environment: Callable[[str], None], tmp_path: Path) -> None:
    environment("0.12.0")
    old = tmp_path / "Qwen3-VL-8B-Instruct"
    old.mkdir()
    (old / "mine").write_text("")
    done = run(tmp_path)
    assert (done.returncode, "--force" in done.stderr) == (1, True)
    # What does not fit is not put there either, nor what the compiler fails with.
    done = run(tmp_path, "--force", LOSE="decoder_batch_4")
    assert done.returncode == 1
    assert "decoder_batch_4.rbln is missing" in done.stderr
    path = tmp_path / "eccon.toml"
    text = path.read_text()
    path.write_text(text.replace("[compile]", "[compile]\nextra = { frobnicate = 1 }"))
    done = run(tmp_path, "--force")
    assert done.returncode == 1
    assert "Unexpected arguments: {'frobnicate'}" in done.stderr
    assert [p.name for p in old.iterdir()] == ["mine"]
    path.write_text(text)
    assert run(tmp_path, "--force").returncode == 0
    assert not (old / "mine").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["Qwen3-VL-8B-Instruct", "eccon.toml", "venv"]


def test_options_that_cannot_work_are_refused_before(
    environment: Callable[[str], None], tmp_path: Path
) -> None:
    environment("0.12.0")
    path = tmp_path / "eccon.toml"
    path.write_text(path.read_text().replace("[1, 2, 4, 8]", "[1, 2, 16]"))
    done = run(tmp_path)
    assert done.returncode == 2
    assert "compile.decoder_batch_sizes = [1,2,16]: must have batch_size, 8, as its largest" in done.stderr


def test_without_the_compiler_it_says_what_is_missing(tmp_path: Path) -> None:
    path = scaffold.guide(tmp_path, name="g", model="Qwen3-VL-8B-Instruct")
    path.write_text(path.read_text().replace('vllm = "vllm"', 'vllm = "bin/vllm"', 1))
    done = run(tmp_path)
    assert (done.returncode, "'bin/vllm': no such command" in done.stderr) == (1, True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text(f"#!{sys.executable}\n")
    (tmp_path / "bin" / "vllm").chmod(0o755)
    (tmp_path / "lib" / "python3.12" / "site-packages").mkdir(parents=True)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "has no optimum-rbln" in done.stderr
    assert "--dry-run" in done.stderr
    # The newest version's words, as none is installed.
    assert '"num_devices": 8' in run(tmp_path, "--dry-run").stdout


def test_an_interrupt_leaves_nothing(environment: Callable[[str], None], tmp_path: Path) -> None:
    environment("0.12.0")
    command = [sys.executable, "-m", "eccon", "compile"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"SLOW": "1"}, stderr=subprocess.PIPE
    ) as process:
        begun = tmp_path / "begun"
        end = time.monotonic() + 60
        while not (begun.exists() and begun.read_text()):
            assert time.monotonic() < end
            time.sleep(0.02)
        compiler = psutil.Process(int(begun.read_text()))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    gone, alive = psutil.wait_procs([compiler], timeout=30)
    assert (len(gone), alive) == (1, [])
    assert not list(tmp_path.glob(".*.partial"))

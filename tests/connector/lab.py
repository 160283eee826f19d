"""Real vLLM with the guarded connector, as the contract tests start it without."""

import os
from pathlib import Path
from typing import Any

from eccon.connector import CLASS, DIRECTORY, MODULE
from tests.contract.target import LabTarget

__all__ = ["GuardedLab"]


class GuardedLab(LabTarget):
    """The lab, every server of it guarded."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.patience = 400.0

    def connector(self) -> dict[str, Any]:
        return {"ec_connector": CLASS, "ec_connector_module_path": MODULE}

    def environment(self) -> dict[str, str]:
        before = os.environ.get("PYTHONPATH")
        return super().environment() | {"PYTHONPATH": str(DIRECTORY) + (f":{before}" if before else "")}

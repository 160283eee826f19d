"""The guard over the vendor's real classes, without a server: `ECCON_LAB=DIR`."""

import os
import subprocess
from pathlib import Path

import pytest

from eccon.connector import DIRECTORY
from tests.contract.target import LabTarget


@pytest.mark.skipif("ECCON_LAB" not in os.environ, reason="needs a lab: ECCON_LAB=DIR")
@pytest.mark.timeout(300)
def test_over_the_vendors_classes(tmp_path: Path) -> None:
    lab = LabTarget(tmp_path)
    python = Path(lab.command[0]).with_name("python")
    script = Path(__file__).with_name("on_vendor.py")
    done = subprocess.run(
        [python, script, DIRECTORY], env=lab.environment(), capture_output=True, text=True, timeout=280
    )
    assert done.stdout.splitlines()[-1:] == ["as it should be"], done.stderr[-3000:]

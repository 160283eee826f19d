"""A cluster of the demo's topology for tests: started by the `eccon` command, gone afterwards."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from PIL import Image, ImageStat

from eccon import prompt, scaffold

T = TypeVar("T")

FAST = {
    "ECCON_SIM_START_S": "0.3",
    "ECCON_SIM_ENCODE_MS": "20",
    "ECCON_SIM_ENCODE_MS_PER_MPIX": "40",
    "ECCON_SIM_PREFILL_MS": "5",
    "ECCON_SIM_TOKEN_MS": "1",
}


def until(probe: Callable[[], T | None], what: str, seconds: float = 30.0) -> T:
    """The first true answer of `probe`, asked again and again; fails when there is none in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := probe():
            return found
        time.sleep(0.05)
    msg = f"not within {seconds:g} s: {what}"
    raise AssertionError(msg)


class Cluster:
    """One directory with an eccon.toml, its own state directory, and the command run against it."""

    def __init__(self, directory: Path, encoders: int = 4) -> None:
        self.directory = directory
        self.ports = scaffold.free_ports(encoders + 2)
        self.config = scaffold.demo(directory, name="t", encoders=encoders, ports=self.ports)
        # With every mark of ours a process of this cluster can be told from all others.
        self.mark = f"ECCON_STATE_DIR={directory}"
        self.env = {**os.environ, **FAST, "ECCON_STATE_DIR": str(directory), "HOME": str(directory)}

    @property
    def socket(self) -> Path:
        return self.directory / "t" / "control.sock"

    @property
    def public_url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def command(self, *args: str) -> list[str]:
        """argv of `eccon -f CONFIG ARGS`."""
        return [sys.executable, "-m", "eccon", "-f", str(self.config), *args]

    def eccon(
        self, *args: str, code: int | None = 0, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Runs it and checks its exit code."""
        done = subprocess.run(
            self.command(*args),
            env=self.env,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if code is not None:
            assert done.returncode == code, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def state(self) -> dict[str, Any]:
        """The whole state, as JSON says it."""
        state: dict[str, Any] = json.loads(self.eccon("status", "--json").stdout)
        return state

    def process(self, name: str) -> dict[str, Any]:
        """One process of the state."""
        found: dict[str, Any] = next(p for p in self.state()["processes"] if p["name"] == name)
        return found

    def processes(self) -> list[psutil.Process]:
        """Every living process of this cluster, by the mark that all inherit."""
        return processes_with(self.mark)


def processes_with(mark: str) -> list[psutil.Process]:
    """Living processes that have `NAME=VALUE` in their environment, this one left out."""
    name, _, value = mark.partition("=")
    found = []
    for p in psutil.process_iter():
        try:
            if p.pid != os.getpid() and p.status() != psutil.STATUS_ZOMBIE and p.environ().get(name) == value:
                found.append(p)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def listens(port: int) -> bool:
    """Whether anybody accepts on the loopback port."""
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def cluster(encoders: int = 4) -> Iterator[Cluster]:
    """A cluster that is not started yet. At the end it is stopped, and checked that nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="ec-") as name:
        c = Cluster(Path(name), encoders)
        try:
            yield c
        finally:
            c.eccon("down", code=None)
            try:
                until(lambda: not c.processes(), "no process of the cluster is left", 10)
            finally:
                for p in c.processes():
                    p.kill()
            assert not any(listens(port) for port in range(c.ports[0], c.ports[0] + 5 + encoders))


NAMED = re.compile(r"([A-Z]+) (\d+)x(\d+) #(..)(..)(..)")


def assert_names_the_samples(answer: str) -> None:
    """The answer tells, in order, what only the bytes could have told: format, size, mean colour."""
    named = NAMED.findall(answer)
    assert len(named) == len(samples()), answer
    for path, (kind, width, height, *colour) in zip(samples(), named, strict=True):
        with Image.open(path) as image:
            assert (kind, int(width), int(height)) == (image.format, *image.size)
            mean = ImageStat.Stat(image.convert("RGB")).mean
        # A decoder may round otherwise.
        assert [int(c, 16) for c in colour] == pytest.approx(mean, abs=1.5)


def samples() -> list[Path]:
    """The images that come along."""
    return prompt.samples()

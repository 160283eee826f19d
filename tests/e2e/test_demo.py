"""`eccon demo`: the main job in one command, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import FAST, assert_names_the_samples, processes_with, until

MARK = "ECCON_TEST_DEMO"


@pytest.fixture
def env() -> Iterator[dict[str, str]]:
    """An empty HOME and TMPDIR; at the end neither holds anything and no process of ours lives."""
    with tempfile.TemporaryDirectory(prefix="ec-") as name:
        home, tmp = Path(name, "h"), Path(name, "t")
        home.mkdir()
        tmp.mkdir()
        yield {**os.environ, **FAST, "HOME": str(home), "TMPDIR": str(tmp), MARK: name}
        until(lambda: not processes_with(f"{MARK}={name}"), "all processes of the demo have ended", 15)
        assert [*home.iterdir(), *tmp.iterdir()] == []


def demo(*args: str) -> list[str]:
    return [sys.executable, "-m", "eccon", "demo", *args]


@pytest.mark.parametrize("args", [("--headless", "--once"), ()], ids=["asked", "no-terminal"])
def test_once_prints_the_answer_and_every_images_way(env: dict[str, str], args: tuple[str, ...]) -> None:
    done = subprocess.run(
        demo(*args), env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert_names_the_samples(done.stdout)
    rows = re.findall(
        r"^image (\d)  (encoder-\d) +encode +[\d.]+ ms  transfer +([\d.]+) ms$", done.stdout, re.MULTILINE
    )
    assert [int(r[0]) for r in rows] == [*range(1, 9)]
    assert {r[1] for r in rows} == {f"encoder-{i}" for i in range(4)}
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_of_it(env: dict[str, str], number: signal.Signals) -> None:
    with subprocess.Popen(demo("--headless"), env=env, stderr=subprocess.PIPE, text=True) as p:
        assert p.stderr is not None
        assert any("attach a console" in line for line in p.stderr)
        p.send_signal(number)
        p.stderr.read()
        assert p.wait(30) == 130


def test_a_daemon_that_was_killed_leaves_nothing_either(env: dict[str, str]) -> None:
    with subprocess.Popen(demo("--headless"), env=env, stderr=subprocess.PIPE, text=True) as p:
        assert p.stderr is not None
        assert any("attach a console" in line for line in p.stderr)
        (daemon,) = (
            q for q in processes_with(f"{MARK}={env[MARK]}") if "eccon.supervisor" in " ".join(q.cmdline())
        )
        daemon.kill()
        p.stderr.read()
        assert p.wait(60) == 0


def test_two_demos_do_not_meet(env: dict[str, str]) -> None:
    both = [
        subprocess.Popen(demo("--headless", "--once", "--encoders", "1"), env=env, stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [p.wait(60) for p in both] == [0, 0]

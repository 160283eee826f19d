"""`eccon` where there is no configuration: what is found, and what comes of each choice."""

import json
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from eccon import config, discovery
from eccon.console import welcome
from eccon.console.draw.text import plain
from eccon.console.welcome import Welcome, choices, found
from eccon.console.widgets.rows import Rows
from eccon.discovery import Findings, Server
from tests.console.terminal import Terminal


def model_in(directory: Path, devices: int = 4) -> Path:
    directory.mkdir(parents=True)
    (directory / "visual").mkdir()
    for path in (directory, directory / "visual"):
        (path / "rbln_config.json").write_text(json.dumps({"_compile_cfgs": [{"num_devices": devices}]}))
    return directory


def test_devices_models_files_and_clusters_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, home, dev = tmp_path / "here", tmp_path / "home", tmp_path / "dev"
    for path in (here, home, dev, here / "a" / "b", tmp_path / "state" / "lab"):
        path.mkdir(parents=True)
    for name in ("rbln0", "rbln10", "rbln2", "rblnctl", "null"):
        (dev / name).touch()
    model = model_in(home / "models" / "qwen")
    (here / "a" / "eccon.toml").touch()
    monkeypatch.setenv("ECCON_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path / "state" / "lab")  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("control.sock")
        seen = discovery.look(here, dev=dev, home=home)
    assert (seen.kind, seen.devices) == ("rbln", (0, 2, 10))
    assert seen.models == (model,)
    assert seen.files == (here / "a" / "eccon.toml",)
    assert [name for name, _ in seen.clusters] == ["lab"]
    nothing = discovery.look(tmp_path / "none", dev=tmp_path / "none", home=tmp_path / "none")
    assert (nothing.kind, nothing.devices, nothing.models) == ("none", (), ())


@pytest.mark.parametrize("name", ["lab", "My Lab!", "한국", "-"])
def test_the_topology_of_what_was_found_is_a_good_configuration(tmp_path: Path, name: str) -> None:
    model = model_in(tmp_path / 'a "model"')
    text = discovery.topology(
        Findings(kind="rbln", devices=tuple(range(6))), str(model), discovery.cluster_name(name)
    )
    (tmp_path / "eccon.toml").write_text(text)
    topology = config.load(tmp_path / "eccon.toml", compiled=False)
    assert topology.model.path == str(model)
    assert list(topology.pd.devices) == [0, 1, 2, 3]
    assert list(topology.encoders.devices) == [4, 5]
    assert topology.encoders.count == 2


def test_choices_begin_with_what_is_there() -> None:
    bare = [key for key, _ in choices(Findings())]
    assert bare == ["demo", "init:", "file", ""]
    rich = Findings(
        devices=(0, 1),
        kind="rbln",
        models=(Path("/m"),),
        servers=(Server(7, 8000, "x[/]"),),
        clusters=(("lab", Path("/s")),),
        files=(Path("/e/eccon.toml"),),
    )
    assert [key for key, _ in choices(rich)][:4] == ["attach:/s", "file:/e/eccon.toml", "init:/m", "demo"]
    assert "pid 7  port 8000  x[/]" in "\n".join(map(plain, found(rich)))


async def test_keys_of_the_welcome() -> None:
    app = Welcome(Findings())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        rows = app.query_one("#list", Rows)
        assert rows.chosen == "demo"
        await pilot.press("down", "down", "enter")
        await pilot.pause()
        await pilot.press(*"x/eccon.toml", "enter")
        await pilot.pause()
    assert app.return_value == "file:x/eccon.toml"


async def test_a_crash_tells_no_values(capsys: pytest.CaptureFixture[str]) -> None:
    class Falls(Welcome):
        CSS_PATH = str(Path(welcome.__file__).with_name("styles.tcss"))

        def on_mount(self) -> None:
            key = "sk-" + "hidden"
            raise RuntimeError(len(key))

    app = Falls(Findings())
    with pytest.raises(RuntimeError):
        async with app.run_test():
            pass
    said = capsys.readouterr().err
    assert "RuntimeError" in said
    assert "sk-hidden" not in said


@contextmanager
def first_run(directory: Path) -> Iterator[Terminal]:
    env = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "HOME": str(directory), "PATH": "/usr/bin:/bin"}
    env |= {"ECCON_STATE_DIR": str(directory / "state"), "PYTHONPATH": ":".join(sys.path)}
    argv = [
        sys.executable,
        "-c",
        "import os, sys; os.chdir(sys.argv.pop()); from eccon.cli import main; main()",
    ]
    terminal = Terminal([*argv, str(directory)], env, 100, 30)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait(10)
        terminal.hang_up()


def test_a_first_run_on_a_terminal_writes_a_configuration(tmp_path: Path) -> None:
    model = model_in(tmp_path / "models" / "qwen")
    with first_run(tmp_path) as t:
        wanted = f"Write ./eccon.toml for {model}"[:80]
        t.until(wanted)
        lines = [line.strip() for line in t.text.splitlines()]
        first = next(y for y, line in enumerate(lines) if re.match("Open the|Use |Write |Run the", line))
        # Servers of others on this machine, and clusters, stand before it.
        below = next(y for y, line in enumerate(lines) if line.startswith(wanted)) - first
        t.press("j" * below + "\r")
        assert t.wait() == 0
        assert t.restored()
    assert str(model) in (tmp_path / "eccon.toml").read_text()
    assert "look it through" in t.output.decode()


def test_a_first_run_that_is_left_leaves_nothing(tmp_path: Path) -> None:
    with first_run(tmp_path) as t:
        t.until("Run the demo")
        t.press("q")
        assert t.wait() == 0
        assert t.restored()
        assert not psutil.pid_exists(t.process.pid) or t.process.poll() is not None
    assert not list(tmp_path.glob("*.toml"))

"""The console on a real pseudo-terminal over a real cluster: watch, restart, add, send, leave, be killed."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.console.terminal import Terminal
from tests.e2e.cluster import Cluster, cluster, until


@contextmanager
def console(c: Cluster, *args: str, size: tuple[int, int] = (160, 45)) -> Iterator[Terminal]:
    env = {k: v for k, v in c.env.items() if k != "NO_COLOR"}
    env |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
    terminal = Terminal([sys.executable, "-m", "eccon", "-f", str(c.config), *args], env, *size)
    try:
        yield terminal
    finally:
        if terminal.process.poll() is None:
            terminal.process.kill()
        terminal.process.wait(10)
        terminal.hang_up()


def row(t: Terminal, name: str) -> str:
    """The line of the process table that shows `name`."""
    return next((line for line in t.lines if f" {name} " in line and "ready" in line), "")


def choose(t: Terminal, name: str, order: list[str]) -> None:
    """Moves the cursor to a process."""
    t.press("\x1b[H")
    for _ in range(order.index(name)):
        t.press("\x1b[B")
    t.settle()


def test_restart_add_and_prompt_by_key(running: Cluster) -> None:
    before = running.process("encoder-1")["pid"]
    with console(running) as t:
        t.until(lambda: all(row(t, f"encoder-{i}") for i in range(4)))
        choose(t, "encoder-1", [p["name"] for p in running.state()["processes"]])
        t.press("r")
        t.until("encoder-1?")
        t.press("y")
        until(lambda: running.process("encoder-1")["pid"] not in (before, None), "another pid")
        pid = running.process("encoder-1")["pid"]
        t.until(lambda: str(pid) in row(t, "encoder-1"), 30)

        t.press("a")
        t.until("dd an encoder")
        t.press("y")
        t.until(lambda: row(t, "encoder-4"), 30)
        until(lambda: running.process("encoder-4")["encoder"]["state"] == "ready", "it takes items")

        t.press("p")
        t.until("est prompt")
        t.press("\r")  # the samples are chosen already
        trace = until(
            lambda: next(
                (x for x in running.state()["traces"] if x.get("items") and x.get("status") == 200), None
            ),
            "an answer",
        )
        t.press("\x1b")
        t.until(lambda: "est prompt" not in t.text and trace["id"][:8] in t.text)
        t.press("q")
        t.until("Leave the console")
        t.press("l")
        assert t.wait() == 0
        assert t.restored()
    assert {p["state"] for p in running.state()["processes"]} == {"ready"}
    running.eccon("remove", "encoder-4")


@pytest.mark.parametrize("how", ["SIGKILL", "closed pty"])
def test_the_cluster_does_not_notice_a_consoles_end(running: Cluster, how: str) -> None:
    running.eccon("send", "--text", "hello")
    before = running.state()
    with console(running, size=(80, 24)) as t:
        t.until("encoder-3")
        if how == "SIGKILL":
            os.kill(t.process.pid, signal.SIGKILL)
        else:
            t.hang_up()
        t.process.wait(10)
    running.eccon("send", "--text", "still there?")
    after = running.state()
    pids = {p["name"]: p["pid"] for p in before["processes"]}
    assert {p["name"]: p["pid"] for p in after["processes"]} == pids
    assert [x["id"] for x in before["traces"]] == [x["id"] for x in after["traces"]][: len(before["traces"])]
    with console(running) as again:
        again.until(str(pids["encoder-3"]))
        again.until(before["traces"][-1]["id"][:8])


def test_the_console_offers_to_start_the_cluster(fresh: Cluster) -> None:
    with console(fresh) as t:
        t.until("Start it?")
        t.press("y\r")
        t.until(lambda: row(t, "encoder-1"), 40)
        t.press("q")
        t.until("Leave the console")
        t.press("s")
        assert t.wait(30) == 0
    until(lambda: not fresh.processes(), "all have ended")


def test_two_consoles_show_the_same_end(fresh: Cluster) -> None:
    fresh.eccon("up")
    with console(fresh) as one, console(fresh, size=(80, 24)) as two:
        for t in (one, two):
            t.until("encoder-1")
        fresh.eccon("stop", "encoder-1")
        for t in (one, two):
            t.until("stopped")


def test_a_demo_with_a_console_ends_with_q() -> None:
    with cluster() as c:
        env = {**c.env, "TMPDIR": str(c.directory), "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        t = Terminal([sys.executable, "-m", "eccon", "demo"], env, 80, 24)
        try:
            t.until(lambda: t.text.count("ready") >= 6, 40)
            t.press("q")
            t.settle()
            if t.process.poll() is None and "?" in t.text:
                t.press("y")
            assert t.wait(30) == 0
        finally:
            t.process.kill()
            t.process.wait()
            t.hang_up()
        until(lambda: not c.processes(), "all have ended")
        assert not list(c.directory.glob("eccon-demo-*"))

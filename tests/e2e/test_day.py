"""An operator's day in tmux: an encoder hangs, one is added, all are renewed, the terminal dies."""

import asyncio
import http.client
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psutil
import pytest

from eccon import prompt
from eccon.client import Client
from eccon.model import ClusterState
from tests.e2e.cluster import Cluster, cluster, samples, until

TMUX = shutil.which("tmux")
pytestmark = pytest.mark.skipif(TMUX is None, reason="no tmux here: the operator's day is not played")


class Tmux:
    """One window of a tmux server of its own."""

    def __init__(self, c: Cluster) -> None:
        self.name = f"eccon-{os.getpid()}-{c.ports[0]}"
        env = {k: v for k, v in c.env.items() if k not in ("NO_COLOR", "TMUX")} | {"LANG": "C.UTF-8"}
        size = ("-x", "160", "-y", "45")
        self._tmux("new-session", "-d", "-s", "day", *size, "--", *c.command(), env=env)

    def _tmux(self, *args: str, env: dict[str, str] | None = None) -> str:
        argv = [TMUX or "tmux", "-L", self.name, "-f", "/dev/null", *args]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout

    @property
    def text(self) -> str:
        """What is on the screen."""
        return self._tmux("capture-pane", "-p", "-t", "day")

    def row(self, name: str) -> str:
        """The line of the process table that begins with this process."""
        return next((line for line in self.text.splitlines() if line[2:].strip().startswith(f"{name} ")), "")

    def see(self, what: str | Callable[[], object], seconds: float = 40.0) -> None:
        """Waits for a text on the screen, or for a condition."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if what in self.text if isinstance(what, str) else what():
                return
            time.sleep(0.25)
        msg = f"not within {seconds:g} s: {what}\n{self.text}"
        raise AssertionError(msg)

    def press(self, *keys: str) -> None:
        """Presses keys, by tmux's names."""
        self._tmux("send-keys", "-t", "day", *keys)

    def ask(self, key: str, question: str) -> None:
        """Presses a key, waits for its question, says yes."""
        self.press(key)
        self.see(question)
        self.press("y")
        self.see(lambda: question not in self.text)

    def close(self) -> None:
        """The terminal is gone, with all in it."""
        subprocess.run(
            [TMUX or "tmux", "-L", self.name, "kill-server"], capture_output=True, timeout=20, check=False
        )


def state_of(c: Cluster) -> ClusterState:
    """Asked over the socket: a command each time would cost more than the cluster."""
    return asyncio.run(Client(c.socket).state())


def pids_of(c: Cluster) -> dict[str, int | None]:
    """Of all processes, by name."""
    return {p.name: p.pid for p in state_of(c).processes}


def takes_items(c: Cluster, name: str) -> bool:
    """Whether the proxy sends it some."""
    process = state_of(c).process(name)
    return process is not None and process.encoder is not None and process.encoder.state == "ready"


@contextmanager
def console(c: Cluster) -> Iterator[Tmux]:
    tmux = Tmux(c)
    try:
        yield tmux
    finally:
        tmux.close()


class Load:
    """Requests with images to the public port, one after the other, until it is ended."""

    def __init__(self, c: Cluster, lanes: int = 2) -> None:
        self.statuses: list[str] = []
        self._over = threading.Event()
        self._where = urlsplit(c.public_url)
        self._body = prompt.build(state_of(c).cluster.model, "?", [str(p) for p in samples()[:3]])
        self._threads = [threading.Thread(target=self._run) for _ in range(lanes)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            to = http.client.HTTPConnection(self._where.hostname or "", self._where.port or 0, timeout=60)
            try:
                to.request("POST", "/v1/chat/completions", self._body, {"Content-Type": "application/json"})
                answer = to.getresponse()
                text = answer.read()
                self.statuses.append("200" if answer.status == 200 else f"{answer.status} {text[:200]!r}")
            except OSError as e:
                self.statuses.append(f"{type(e).__name__}: {e}")
            finally:
                to.close()

    def end(self) -> list[str]:
        """What became of each request."""
        self._over.set()
        for thread in self._threads:
            thread.join(90)
        return self.statuses


@pytest.mark.timeout(400)
def test_a_day() -> None:
    with cluster() as c:
        c.eccon("up")
        c.eccon("send", "--samples")  # from now on it is known how long an encode takes
        with console(c) as t:
            t.see(lambda: all("ready" in t.row(f"encoder-{i}") for i in range(4)))

            # An encoder hangs while its health says 200: it is seen, and restarted with its key.
            before = pids_of(c)["encoder-2"]
            engine = psutil.Process(before).children()[-1]
            engine.send_signal(signal.SIGSTOP)
            load = Load(c)
            t.see(lambda: "stalled" in t.row("encoder-2") or "ejected" in t.row("encoder-2"), 60)
            t.see("encoder-2: ")  # the alarm names it
            assert set(load.end()) == {"200"}
            t.press("/", "encoder-2", "Enter")  # the alarm comes and goes with the proxy's trials
            t.see("Processes  filter: encoder-2")
            t.ask("r", "Restart encoder-2?")
            t.press("Escape")
            t.see(lambda: t.row("encoder-1"))
            t.see(lambda: "ready" not in t.row("encoder-2"))
            t.see(lambda: " ready" in t.row("encoder-2"), 60)
            after = until(lambda: pids_of(c)["encoder-2"], "a pid")
            assert after != before
            assert not engine.is_running()

            # One more.
            t.ask("a", "Add an encoder?")
            t.see(lambda: " ready" in t.row("encoder-4"), 60)
            until(lambda: takes_items(c, "encoder-4"), "it takes items")

            # Eight images, their waterfall, the log lines of the slowest.
            t.press("p")
            t.see("Test prompt")
            t.press("Enter")
            t.see(lambda: "● console-" in t.text and "  total " in t.text)
            t.press("Escape")
            t.see(lambda: "Test prompt" not in t.text)
            t.press("t")
            t.see("console-")
            t.press("Enter")
            t.see("image 8")
            assert "first byte after" in t.text
            t.press("Escape")
            t.see(lambda: "image 8" not in t.text)
            t.press("l")
            t.see(lambda: "search" in t.text and "mm_hash=" in t.text)
            t.see("1/")
            t.press("Escape", "Escape")
            t.see("Processes")

            # All encoders anew under load, and no request fails.
            pids = pids_of(c)
            load = Load(c)
            t.ask("R", "one after the other?")
            until(
                lambda: any(e.text == "rolling restart done" for e in state_of(c).events),
                "the rolling restart",
                120,
            )
            answers = load.end()
            assert len(answers) > 5
            assert set(answers) == {"200"}
            fresh = pids_of(c)
            assert {n for n in pids if pids[n] != fresh[n]} == {f"encoder-{i}" for i in range(5)}

        # The terminal is gone; the servers are not.
        c.eccon("send", "--samples")
        assert pids_of(c) == fresh
        with console(c) as t:
            t.see(lambda: all(" ready" in t.row(f"encoder-{i}") for i in range(5)))
            t.see(lambda: str(fresh["encoder-0"]) in t.row("encoder-0"))
            t.press("q")
            t.see("Leave the console")
            t.press("l")

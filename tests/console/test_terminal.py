"""The console on a real pseudo-terminal: signals, hang-ups, sizes, poor terminals, text from outside."""

import os
import random
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from eccon.model import ClusterChanged, ProcessChanged, TraceChanged
from tests.console import states
from tests.console.fake_daemon import FakeDaemon, running
from tests.console.terminal import MAIN, Terminal, open_console


def shown(terminal: Terminal) -> None:
    """Waits for the cluster's state on the screen."""
    terminal.until("encoder-1")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_ends_it_and_the_terminal_is_as_it_was(number: signal.Signals, code: int) -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket) as terminal:
        shown(terminal)
        terminal.process.send_signal(number)
        assert terminal.wait() == code
        assert terminal.restored()


def test_a_crash_restores_the_terminal_first_and_says_so_in_the_exit_code() -> None:
    crash = MAIN.replace(
        "sys.exit(",
        "from eccon.console import app\n"
        "async def boom(self):\n    secret = 'hunter' + '2'\n    raise RuntimeError('boom [/] here')\n"
        "app.ConsoleApp.act_add = lambda self: self.run_worker(boom(self))\nsys.exit(",
    )
    with running(states.busy()) as daemon, open_console(daemon.socket, main=crash) as terminal:
        shown(terminal)
        terminal.press("a")
        assert terminal.wait() not in (0, None)
        assert terminal.restored()
        after = re.sub(
            "\x1b\\[[0-9;]*m", "", terminal.output[terminal.output.rfind(b"\x1b[?1049l") :].decode()
        )
        assert "boom [/] here" in after
        assert "hunter2" not in after


def test_it_stops_and_goes_on_as_a_shell_job_does() -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket) as terminal:
        shown(terminal)
        process = psutil.Process(terminal.process.pid)
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.until(lambda: process.status() == psutil.STATUS_STOPPED)
        terminal.read(0.2)
        assert terminal.restored()
        terminal.screen.reset()
        terminal.process.send_signal(signal.SIGCONT)
        shown(terminal)
        terminal.until("leave")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait() == 143
        assert terminal.restored()


@pytest.mark.parametrize("ignored", [False, True], ids=["plain", "nohup"])
def test_a_terminal_that_goes_away_ends_it(ignored: bool) -> None:
    main = (
        MAIN.replace("import sys\n", "import sys, signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
        if ignored
        else MAIN
    )
    with running(states.busy()) as daemon, open_console(daemon.socket, main=main) as terminal:
        shown(terminal)
        terminal.hang_up()
        assert terminal.process.wait(20) != 0  # it may only be starting
        wait_for(lambda: daemon.streams == 0)


def wait_for(there: "object", seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not there():  # type: ignore[operator]
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


def test_a_terminal_that_does_not_read_does_not_keep_it() -> None:
    with running(states.busy(40)) as daemon, open_console(daemon.socket, size=(200, 60)) as terminal:
        shown(terminal)
        for n in range(300):  # nobody reads the master: the pseudo-terminal's buffer fills
            daemon.change(
                TraceChanged(seq=100 + n, trace=states.trace_of(1000 + n, states.NOW + n, images=n % 9))
            )
            terminal.press("\t\x0c")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.process.wait(45) in (129, 143)


@pytest.mark.parametrize(
    ("name", "env"),
    [("dumb", {"TERM": "dumb"}), ("empty", {"TERM": ""})],
)
def test_a_terminal_that_cannot_draw_is_refused(name: str, env: dict[str, str]) -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket, env=env) as terminal:
        assert terminal.wait() == 2
        assert b"\x1b" not in terminal.output
        assert terminal.output.count(b"\n") == 1
        assert b"eccon status" in terminal.output
        assert daemon.requests == []


@pytest.mark.parametrize("which", ["stdin", "stdout"])
def test_a_pipe_is_no_terminal(which: str, tmp_path: Path) -> None:
    streams = {"stdin": subprocess.DEVNULL} if which == "stdin" else {}
    done = subprocess.run(
        [sys.executable, "-c", MAIN, str(tmp_path / "s")],
        capture_output=True,
        env={**os.environ, "TERM": "xterm-256color"},
        timeout=30,
        **streams,  # type: ignore[call-overload]
    )
    assert done.returncode == 2
    assert b"\x1b" not in done.stdout + done.stderr
    assert done.stderr.count(b"\n") == 1


def test_without_colour_nothing_has_a_hue() -> None:
    with running(states.degraded()) as daemon, open_console(daemon.socket, env={"NO_COLOR": "1"}) as terminal:
        shown(terminal)
        terminal.until("stalled")
        terminal.press("r")
        terminal.until("No")
        hues = {c.fg for row in terminal.screen.buffer.values() for c in row.values()} | {
            c.bg for row in terminal.screen.buffer.values() for c in row.values()
        }
        assert hues <= {"default"}
        assert "▲" in terminal.text
        assert any(c.reverse for row in terminal.screen.buffer.values() for c in row.values())


@pytest.mark.parametrize("term", ["xterm-256color", "linux"])
def test_a_c_locale_gets_ascii(term: str) -> None:
    env = {"LANG": "C", "TERM": term, "COLORTERM": ""}
    with (
        running(states.hostile()) as daemon,
        open_console(daemon.socket, env=env, size=(120, 36)) as terminal,
    ):
        shown(terminal)
        assert terminal.output.decode().isascii()
        for key in ("t", "\x1b", "l", "\x1b", "p", "\x1b", "?"):
            terminal.press(key)
            terminal.settle()
        assert terminal.output.decode().isascii()


def test_ctrl_c_asks_and_a_second_one_leaves_and_nothing_is_stopped() -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket, "ask") as terminal:
        shown(terminal)
        terminal.press("\x03")
        terminal.until("Leave the console")
        terminal.press("\x03")
        assert terminal.wait() == 0
        assert terminal.restored()
        assert not any(r.startswith(("POST", "DELETE")) for r in daemon.requests)


def test_the_mouse_is_given_back_and_the_screen_is_sent_again() -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket) as terminal:
        shown(terminal)
        for ends_with, says in ((b"l", "select as usual"), (b"h", "is the console's")):
            terminal.press("M")
            terminal.until(says)
            last = terminal.output[terminal.output.rfind(b"\x1b[?1000") :]
            assert last.startswith(b"\x1b[?1000" + ends_with)
        terminal.screen.reset()
        assert "encoder-1" not in terminal.text
        terminal.press("\x0c")
        shown(terminal)
        terminal.until("leave")


def test_leaving_may_stop_the_servers() -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket, "ask") as terminal:
        shown(terminal)
        terminal.press("q")
        terminal.until("stop the servers")
        terminal.press("\x1b")
        terminal.until(lambda: "stop the servers" not in terminal.text)
        assert all(r.startswith("GET") for r in daemon.requests)
        terminal.press("q")
        terminal.until("stop the servers")
        terminal.press("s")
        assert terminal.wait() == 0
        assert "POST /v1/shutdown" in daemon.requests


def test_a_destructive_key_asks_names_its_target_and_defaults_to_no() -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket) as terminal:
        shown(terminal)
        terminal.press("jjj")  # to encoder-1
        terminal.press("r")
        terminal.until("Restart encoder-1?")
        assert "3 encoders remain" in terminal.text
        terminal.press("q")
        terminal.until(lambda: "Restart encoder-1?" not in terminal.text)
        terminal.press("r")
        terminal.until("Restart encoder-1?")
        terminal.press("\r")
        terminal.until(lambda: "Restart encoder-1?" not in terminal.text)
        assert not [r for r in daemon.requests if r.startswith("POST")]
        terminal.press("r")
        terminal.until("Restart encoder-1?")
        terminal.press("y")
        terminal.until("encoder-1 restarts")
        assert "POST /v1/processes/encoder-1/restart" in daemon.requests


def test_a_refusal_is_said() -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket) as terminal:
        daemon.refusal = "no free device [/]"
        shown(terminal)
        terminal.press("a")
        terminal.until("Add an encoder?")
        terminal.press("y")
        terminal.until("no free device [/]")


def test_a_read_only_console_sends_nothing() -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket, "read-only") as terminal:
        shown(terminal)
        terminal.until("read-only")
        for key in "raspxKSUDR":
            terminal.press(key)
            terminal.read()
        terminal.until("this console is read-only")
        terminal.press("q")
        assert terminal.wait() == 0
        assert all(r.startswith("GET") for r in daemon.requests)


def test_sizes_from_nothing_to_huge() -> None:
    with running(states.many(64)) as daemon, open_console(daemon.socket) as terminal:
        shown(terminal)
        for width, height in ((40, 10), (20, 5), (1, 1), (0, 0), (3, 40), (200, 2), (400, 100), (80, 24)):
            terminal.resize(width, height)
            terminal.settle()
        terminal.until("encoder-1")
        terminal.until("leave")
        terminal.resize(20, 5)
        terminal.until("too small")
        terminal.resize(40, 10)
        terminal.until(lambda: "encoder-1" in terminal.text and "ready" in terminal.text)
        terminal.until("↓")  # there is more, and it says so
        dice = random.Random(7)
        for n in range(50):
            terminal.resize(dice.randrange(1, 200), dice.randrange(1, 60))
            daemon.change(TraceChanged(seq=100 + n, trace=states.trace_of(2000 + n, states.NOW)))
            terminal.read(0.02)
        terminal.resize(80, 24)
        terminal.until("encoder-1")
        terminal.press("q")
        assert terminal.wait() == 0


def test_text_from_outside_is_shown_as_it_is() -> None:
    with running(states.hostile()) as daemon, open_console(daemon.socket, size=(120, 36)) as terminal:
        daemon.log = [*states.HOSTILE[:6], states.HOSTILE[7], "x" * 90_000]
        shown(terminal)
        for key in ("e", "\x1b", "t", "\r", "\x1b", "\x1b", "\r", "\x1b", "l"):
            terminal.press(key)
            terminal.settle()
        terminal.until("[bold red]x[/bold]")
        terminal.until("␛]52;c;aGk=␇")
        assert b"\x1b]52" not in terminal.output
        assert b"\x1b]8" not in terminal.output
        assert terminal.process.poll() is None


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
def test_columns_stay_aligned_with_wide_text(size: tuple[int, int]) -> None:
    with running(states.hostile()) as daemon, open_console(daemon.socket, size=size) as terminal:
        shown(terminal)
        terminal.press("e")
        terminal.until("Events")
        terminal.press("\x1b")
        terminal.until("Traces")
        heading = next(line for line in terminal.lines if "request" in line and "code" in line)
        at = heading.index("code")
        rows = [line for line in terminal.lines if " 500 " in line]
        assert rows
        # pyte keeps a cell of its own, empty, for the right half of a wide character
        assert all(terminal_column(line, " 500 ") + 1 == at for line in rows)


def terminal_column(line: str, text: str) -> int:
    return line.index(text)


def test_a_lost_daemon_is_said_and_found_again() -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket) as terminal:
        shown(terminal)
        daemon.stop()
        terminal.until("daemon lost")
        assert "encoder-1" in terminal.text
        daemon.state = msgspec.structs.replace(
            daemon.state, cluster=msgspec.structs.replace(daemon.state.cluster, name="other")
        )
        daemon.start()
        terminal.until("other")
        assert "daemon lost" not in terminal.text


def test_idle_it_writes_nothing_and_a_busy_one_little() -> None:
    state = states.busy()
    with running(state) as daemon, open_console(daemon.socket) as terminal:
        shown(terminal)
        terminal.until(lambda: not terminal.read(1.5))  # the first frames
        if state.cluster.requests_per_s:  # a busy state draws each second; nothing of it changes here
            assert terminal.read(2.5) == b""
        before = len(terminal.output)
        began = time.monotonic()
        seq = 100
        while time.monotonic() - began < 5.0:
            for p in daemon.state.processes[2:]:
                seq += 1
                assert p.encoder is not None
                info = msgspec.structs.replace(p.encoder, items=p.encoder.items + 3, inflight=seq % 3)
                changed = msgspec.structs.replace(p, encoder=info, cpu_percent=30.0 + seq % 17)
                daemon.change(ProcessChanged(seq=seq, process=changed))
            seq += 1
            daemon.change(TraceChanged(seq=seq, trace=states.trace_of(seq, states.NOW + seq, images=4)))
            seq += 1
            rate = 3.0 + seq % 10 / 10
            info2 = msgspec.structs.replace(daemon.state.cluster, requests_per_s=rate)
            daemon.change(ClusterChanged(seq=seq, cluster=info2))
            terminal.read(0.25)
        per_s = (len(terminal.output) - before) / (time.monotonic() - began)
        assert per_s < 3000, f"{per_s:.0f} bytes a second"


def test_a_paste_is_one_line_and_does_not_submit(tmp_path: Path) -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket, size=(100, 30)) as terminal:
        shown(terminal)
        terminal.press("p")
        terminal.until("Test prompt")
        terminal.press("\t")  # from the text to the images
        terminal.press("\x15")  # ctrl-u empties the field
        long = "/models/" + "m" * 4000 + ".png"
        terminal.press(f"\x1b[200~{long}\n\x1b[201~")
        terminal.until("mmmm")
        terminal.settle()
        assert "Test prompt" in terminal.text
        assert not [r for r in daemon.requests if r.startswith("POST")]


def test_a_prompt_is_sent_and_its_answer_shown(daemon_answer: FakeDaemon) -> None:
    daemon = daemon_answer
    with open_console(daemon.socket, size=(100, 30)) as terminal:
        shown(terminal)
        terminal.press("p")
        terminal.until("Test prompt")
        terminal.until("samples")
        terminal.press("\t\x15new:3x40x30" + 6 * "\x1b[D" + "\x7f2\r")
        terminal.until("안녕 [/] there")
        body = msgspec.json.decode(daemon.bodies[-1])
        parts = body["messages"][0]["content"]
        assert [p["type"] for p in parts] == ["image_url", "image_url", "text"]
        request = next(r for r in daemon.requests if "/v1/prompt" in r)
        assert request.startswith("POST")
        trace_id = next(word for word in terminal.text.split() if word.startswith("console-"))
        trace = msgspec.structs.replace(states.trace_of(77, time.time(), images=2), id=trace_id)
        daemon.change(TraceChanged(seq=500, trace=trace))
        terminal.until("encoder-1")
        terminal.until("798 ms")
        terminal.press("\x17")
        terminal.until("PD to first byte")
        assert "image 2" in terminal.text


@pytest.fixture
def daemon_answer() -> "object":
    with running(states.busy()) as daemon:
        text = "안녕".encode()
        daemon.answer = [
            b'data: {"choices":[{"delta":{"content":"' + text[:2],
            text[2:]
            + b'"}}]}\n\ndata: {"choices":[{"delta":{"content":" [/] there"},"finish_reason":"stop"}]}\n\n',
            b"data: [DONE]\n\n",
        ]
        yield daemon


def test_no_thread_keeps_it_alive_and_the_terminal_settings_are_kept() -> None:
    with running(states.busy()) as daemon, open_console(daemon.socket) as terminal:
        shown(terminal)
        assert termios.tcgetattr(terminal.slave) != terminal.before
        terminal.press("q")
        assert terminal.wait(20) == 0
        assert terminal.restored()


def test_what_is_typed_ahead_reaches_the_dialog_that_it_opens(daemon: FakeDaemon) -> None:
    with open_console(daemon.socket, size=(120, 36)) as t:
        t.until("encoder-3")
        t.press("/encoder-3\r")
        t.until("filter: encoder-3")
        t.press("ry")
        until = time.monotonic() + 15
        while "POST /v1/processes/encoder-3/restart" not in daemon.requests and time.monotonic() < until:
            t.read()
        assert "POST /v1/processes/encoder-3/restart" in daemon.requests
        t.press("t\x1b[B\x1b[B\r")  # the list, its third line, its waterfall
        t.until("req-beef")
        t.until("timed out")

"""Terminals that go away, clients that leave in the middle, orphans by the hundred."""

import asyncio
import os
import pty
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

from eccon.model import State
from tests.supervisor.conftest import Site, until


def terminal_of(pid: int) -> bytes:
    """Number of a process's controlling terminal; 0: it has none."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[4]


async def test_servers_outlive_the_terminal_that_started_them(site: Site) -> None:
    """`eccon up` in the foreground of a terminal that is closed: the link dropped."""
    site.write(FAKE_PD="slow=1")
    master, slave = pty.openpty()
    # A leader of a session without a terminal gets the one that it opens first.
    tty = os.ttyname(slave)
    shell = subprocess.Popen(
        [
            "sh",
            "-c",
            f"exec <{tty} >{tty} 2>&1; '{sys.executable}' -m eccon -f '{site.config}' up; sleep 1000",
        ],
        start_new_session=True,
    )
    await until(lambda: terminal_of(shell.pid) != b"0", 20, "its terminal")
    os.close(slave)
    said = b""

    def read() -> None:
        nonlocal said
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:
                return
            if not part:
                return
            said += part

    reader = threading.Thread(target=read)
    reader.start()
    await until(lambda: b"pd" in said and site.paths.control_socket.exists(), 60, "progress on the terminal")
    pid = site.daemon_pid()
    os.killpg(shell.pid, signal.SIGHUP)
    shell.wait(20)
    os.close(master)
    state = await site.see(lambda s: all(p.state is State.READY for p in s.processes), 60)
    reader.join(20)
    assert site.daemon_pid() == pid
    lines = [line async for line in site.client.logs("pd")]
    assert "Application startup complete." in lines
    for p in state.processes:
        assert p.pid
        assert os.getsid(p.pid) == p.pid
        assert terminal_of(p.pid) == b"0"


async def test_a_client_that_leaves_in_the_middle_harms_nobody(site: Site) -> None:
    await site.up(encoders=1)

    def call(request: bytes) -> socket.socket:
        s = socket.socket(socket.AF_UNIX)
        s.connect(str(site.paths.control_socket))
        s.sendall(request)
        return s

    before = await site.process("encoder-0")
    half = [
        call(
            b"POST /v1/processes/encoder-0/restart?wait=100 HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
        ),
        call(b"GET /v1/events?console=1 HTTP/1.1\r\nhost: x\r\n\r\n"),
        call(b"POST /v1/prompt HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n{"),
        call(b"GET /v1/st"),
    ]
    await site.see(lambda s: s.process("encoder-0").state is not State.READY)  # type: ignore[union-attr]
    for s in half:
        s.close()
    await site.see(lambda s: s.process("encoder-0").pid not in {None, before.pid})  # type: ignore[union-attr]
    await site.settled()
    # Two consoles disagree: both see the same end.
    one, other = site.client, site.client
    await asyncio.gather(
        *(c.stop("encoder-0") if n % 2 else c.start("encoder-0") for n in range(20) for c in (one, other))
    )
    await one.stop("encoder-0")
    ends = await asyncio.gather(
        *(site.see(lambda s: s.process("encoder-0").state is State.STOPPED) for _ in range(2))  # type: ignore[union-attr]
    )
    assert len({s.process("encoder-0").exit for s in ends}) == 1  # type: ignore[union-attr]


def test_orphans_that_fall_to_the_daemon_are_taken(tmp_path: Path) -> None:
    """As PID 1 of a container it is the last parent; none stays a zombie, and others' statuses are right."""
    program = tmp_path / "daemon.py"
    program.write_text(
        textwrap.dedent(
            """
            import asyncio, ctypes, subprocess, sys, time
            from pathlib import Path
            from eccon.supervisor import reaper

            async def main():
                ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
                reaper.install()
                loop = asyncio.get_running_loop()
                for n in range(20):
                    await asyncio.gather(*(
                        loop.run_in_executor(None, subprocess.run, ["sh", "-c", "(sh -c 'exit 5' &)"])
                        for _ in range(10)
                    ))
                me = str(__import__("os").getpid())
                deadline = time.monotonic() + 20
                while time.monotonic() < deadline:
                    left = Path(f"/proc/{me}/task/{me}/children").read_text().split()
                    if not left:
                        print("none left")
                        return
                    await asyncio.sleep(0.05)
                print("left", left)

            asyncio.run(main())
            """
        )
    )
    run = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.stdout == "none left\n", run.stderr

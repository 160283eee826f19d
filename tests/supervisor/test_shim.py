"""The shim on its own, with programs that do not behave."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eccon import shim
from tests.supervisor.conftest import marked, until


class Kept:
    """A program kept by a shim."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.life = directory / "run" / "x@1"
        self.life.mkdir(parents=True)
        self.log = directory / "x.log"
        self.shims: list[subprocess.Popen[bytes]] = []

    def start(self, *argv: str, grace_s: float = 2, log_bytes: int = 1 << 20, **more: Any) -> None:
        """A new life."""
        spec = {"argv": argv, "cwd": "/", "log": str(self.log), "log_bytes": log_bytes, "log_files": 3}
        (self.life / "spec.json").write_text(json.dumps(spec | {"grace_s": grace_s} | more))
        self.shim()

    def shim(self) -> None:
        """A shim on the life, waited for until it runs the program."""
        read_end, write_end = os.pipe()
        self.shims.append(
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-E", shim.__file__, f"{self.life}/spec.json", str(write_end)],
                pass_fds=(write_end,),
                start_new_session=True,
            )
        )
        os.close(write_end)
        with os.fdopen(read_end, "rb") as f:
            self.answer = json.loads(f.readline())

    def python(self, code: str, **more: Any) -> None:
        """A program in Python, which says `up` when it is."""
        self.start(sys.executable, "-uc", code, **more)

    def status(self) -> dict[str, Any]:
        """What the shim wrote down."""
        return shim.read_whole(f"{self.life}/status.json")

    def exit(self) -> dict[str, Any]:
        """How the program ended."""
        return shim.read_whole(f"{self.life}/exit.json")

    async def says(self, text: str) -> None:
        """Until the log has it."""
        await until(lambda: self.log.exists() and text in self.log.read_text(errors="replace"), 10, text)

    async def over(self, timeout: float = 10) -> None:
        """Until the shim has ended."""
        await until(lambda: self.shims[-1].poll() is not None, timeout, "the shim's end")


@pytest.fixture
def kept(short_dir: Path) -> Iterator[Kept]:
    """A program to keep; whatever lives on at the end is a failure."""
    k = Kept(short_dir)
    yield k
    left = marked(short_dir)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in k.shims:
        process.wait(5)
    assert not left


async def test_exit_codes_and_signals_are_told_apart(kept: Kept, short_dir: Path) -> None:
    kept.python("import sys; print('bye'); sys.exit(7)")
    await kept.over()
    assert {"code": 7, "signal": None, "asked": False}.items() <= kept.exit().items()
    assert "bye" in kept.log.read_text()

    other = Kept(short_dir / "other")
    other.python("import os; os.kill(os.getpid(), 9)")
    await other.over()
    assert {"code": None, "signal": 9}.items() <= other.exit().items()


async def test_a_program_that_cannot_be_started_says_why(kept: Kept) -> None:
    kept.start("/no/such/program")
    await kept.over()
    assert "cannot start /no/such/program" in kept.answer["error"]
    assert "No such file" in kept.answer["error"]
    assert kept.exit()["code"] == 127


async def test_asked_to_end_it_ends_well(kept: Kept) -> None:
    kept.python(
        "import signal,sys,time; signal.signal(15, lambda *_: sys.exit(0)); print('up'); time.sleep(1000)"
    )
    await kept.says("up")
    kept.shims[-1].terminate()
    await kept.over()
    assert {"code": 0, "asked": True}.items() <= kept.exit().items()


async def test_a_whole_tree_that_ignores_term_is_killed_after_the_grace(kept: Kept) -> None:
    kept.python(
        "import os,signal,time\nsignal.signal(15, signal.SIG_IGN)\nfor _ in range(3):\n"
        "    if os.fork() == 0: os.setsid()\nprint('up')\nwhile True: time.sleep(1000)",
        grace_s=0.5,
    )
    await kept.says("up")
    begun = time.monotonic()
    kept.shims[-1].terminate()
    await kept.over()
    assert 0.4 < time.monotonic() - begun < 10
    assert kept.exit()["signal"] == 9


async def test_what_a_killed_parent_leaves_behind_is_ended(kept: Kept) -> None:
    """A child in a session of its own that ignores SIGHUP, and one that was forked twice."""
    kept.python(
        "import os,signal,subprocess,time\nsignal.signal(1, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep','1000'], start_new_session=True)\n"
        "subprocess.Popen(['setsid','-f','sleep','1000'])\ntime.sleep(.2)\nprint('up')\ntime.sleep(1000)"
    )
    await kept.says("up")
    os.kill(kept.status()["pid"], signal.SIGKILL)
    await kept.over()
    assert {"signal": 9, "asked": False}.items() <= kept.exit().items()
    assert kept.status()["clean"]


async def test_a_stopped_program_can_still_be_stopped(kept: Kept) -> None:
    kept.python("import time; print('up'); time.sleep(1000)")
    await kept.says("up")
    os.kill(kept.status()["pid"], signal.SIGSTOP)
    kept.shims[-1].terminate()
    await kept.over()
    assert kept.exit()["signal"] == 15


async def test_a_killed_shim_is_replaced_and_nobody_notices(kept: Kept) -> None:
    kept.python(
        "import itertools,subprocess,time\nsubprocess.Popen(['setsid','-f','sleep','1000'])\n"
        "for n in itertools.count(): print(f'line {n}', flush=True); time.sleep(.01)"
    )
    await kept.says("line 3")
    pid = kept.status()["pid"]
    kept.shims[-1].kill()
    kept.shims[-1].wait()
    # Nobody drains now: what is written meanwhile waits in the pipe.
    await asyncio.sleep(0.2)
    assert Path(f"/proc/{pid}").exists()
    kept.shim()
    assert kept.answer["pid"] == pid
    await kept.says("log taken over")
    seen = kept.log.read_text().count("line")
    await until(lambda: kept.log.read_text().count("line") > seen, 5, "more lines")
    os.kill(pid, signal.SIGTERM)
    await kept.over()
    assert {"code": None, "signal": None}.items() <= kept.exit().items()
    numbers = [int(line[5:]) for line in kept.log.read_text().splitlines() if line.startswith("line")]
    assert numbers == list(range(len(numbers))), "lines were lost while there was no shim"


async def test_a_shim_that_finds_its_program_gone_touches_no_stranger(kept: Kept) -> None:
    """The program's number belongs to somebody else now: to this very test's helper."""
    kept.python("import time; print('up'); time.sleep(1000)")
    await kept.says("up")
    status = kept.status()
    kept.shims[-1].kill()
    kept.shims[-1].wait()
    os.kill(status["pid"], signal.SIGKILL)
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as stranger:
        shim.write_whole(f"{kept.life}/status.json", status | {"pid": stranger.pid})
        kept.shim()
        await kept.over()
        assert stranger.poll() is None
        stranger.kill()
    assert {"code": None, "signal": None}.items() <= kept.exit().items()


@pytest.mark.parametrize("reached", ["directly", "by a link"])
async def test_an_orphan_that_hides_its_mark_is_ended_by_a_new_shim_too(
    short_dir: Path, reached: str
) -> None:
    """An engine's title overwrites its environment; shim and parent are killed; home may be a link."""
    (short_dir / "real").mkdir()
    (short_dir / "link").symlink_to("real")
    k = Kept(short_dir / ("real" if reached == "directly" else "link"))
    k.python(
        "import os,subprocess,time\n"
        "apart = subprocess.Popen(['sleep', '1000'], env={}, start_new_session=True)\n"
        "beside = subprocess.Popen(['sleep', '1000'], env={}, stdout=-3, stderr=-3)\n"
        "print('pids', apart.pid, beside.pid)\ntime.sleep(1000)"
    )
    await k.says("pids")
    await until(lambda: k.log.read_text().rstrip().endswith(tuple("0123456789")), 5, "the pids")
    pids = [int(p) for p in k.log.read_text().partition("pids ")[2].split()[:2]]
    try:
        k.shims[-1].kill()
        k.shims[-1].wait()
        os.kill(k.status()["pid"], signal.SIGKILL)
        k.shim()
        await k.over()
        assert [p for p in pids if Path(f"/proc/{p}").exists() and not shim.Stat(p).zombie] == []
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def test_pinning_and_limits_are_set_before_the_program_begins(kept: Kept) -> None:
    cpu = max(os.sched_getaffinity(0))
    kept.python(
        "import os,resource\nprint('cpus', os.sched_getaffinity(0))\n"
        "print('files', resource.getrlimit(resource.RLIMIT_NOFILE)[0], 'core',"
        " resource.getrlimit(resource.RLIMIT_CORE)[0])",
        affinity=[cpu],
        rlimits={"NOFILE": 321, "CORE": 0},
    )
    await kept.over()
    text = kept.log.read_text()
    assert f"cpus {{{cpu}}}" in text
    assert "files 321 core 0" in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"affinity": [4095]}, "cannot pin it to CPUs [4095]: Invalid argument"),
        ({"rlimits": {"NOFILE": 2**40}}, "cannot set the limit NOFILE to 1099511627776"),
    ],
)
async def test_what_cannot_be_set_is_said(kept: Kept, more: dict[str, Any], said: str) -> None:
    kept.start("true", **more)
    await kept.over()
    assert said in kept.answer["error"]


async def test_a_second_shim_on_the_same_life_steps_back(kept: Kept) -> None:
    kept.python("import time; print('up'); time.sleep(1000)")
    await kept.says("up")
    second = subprocess.run(
        [sys.executable, "-I", "-S", "-E", shim.__file__, f"{kept.life}/spec.json"], check=False
    )
    assert second.returncode == 3
    kept.shims[-1].terminate()
    await kept.over()


async def test_logs_are_rotated_within_their_bound_and_lines_stay_whole(kept: Kept) -> None:
    kept.python(
        "import sys\nfor n in range(20000): sys.stdout.write(f'{n:06} ' + 'x'*90 + '\\n')", log_bytes=100_000
    )
    await kept.over()
    files = sorted(kept.directory.glob("x.log*"))
    assert [f.name for f in files] == ["x.log", "x.log.1", "x.log.2"]
    assert all(f.stat().st_size <= 100_000 for f in files)
    text = "".join(f.read_text() for f in reversed(files))
    lines = [line for line in text.splitlines() if not line.startswith("eccon:")]
    assert all(len(line) == 97 for line in lines)
    assert [int(line[:6]) for line in lines] == list(range(20000 - len(lines), 20000))


async def test_bytes_that_are_no_text_and_lines_without_end_are_kept(kept: Kept) -> None:
    kept.python(
        "import os\nos.write(1, bytes(range(256)) * 10 + b'\\n')\nos.write(2, b'y' * 300_000)",
        log_bytes=100_000,
    )
    await kept.over()
    files = sorted(kept.directory.glob("x.log*"))
    assert all(f.stat().st_size <= 100_000 for f in files)
    assert sum(f.read_bytes().count(b"y") for f in files) > 150_000


async def test_with_a_full_disk_lines_are_dropped_and_counted_and_the_program_lives(kept: Kept) -> None:
    """A limit on the file's size stands for the disk: both fail a write, and both can end."""
    kept.python(
        "import time\nprint('up', flush=True)\nn = 0\n"
        "while True:\n    n += 1; print('z' * 99, flush=True); time.sleep(.0005)",
        log_bytes=10 << 20,
    )
    await kept.says("zzz")
    pid, before = kept.shims[-1].pid, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, before[1]))
    await until(lambda: kept.status().get("dropped", 0) > 50, 10, "dropped lines counted")
    assert Path(f"/proc/{kept.status()['pid']}").exists()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    await kept.says("lines lost here")
    kept.shims[-1].terminate()
    await kept.over()
    lines = kept.log.read_text().splitlines()
    assert all(len(line) == 99 for line in lines if line.startswith("z"))
    told = sum(int(line.split()[1]) for line in lines if "lines lost here" in line)
    assert told == kept.status()["dropped"]


async def test_a_flood_is_not_slowed(kept: Kept) -> None:
    """50,000 lines a second of 200 bytes, as far as this machine can make them."""
    seconds = float(os.environ.get("ECCON_TEST_FLOOD_S", "2"))
    code = (
        "import sys,time\nline = b'f' * 199 + b'\\n'\nout = open(sys.argv[1], 'ab', 0)\n"
        "t = time.monotonic()\n"
        f"for n in range({int(100 * seconds)}):\n    out.write(line * 500)\n"
        "    left = t + n * .01 - time.monotonic()\n"
        "    left > 0 and time.sleep(left)\nprint('took', time.monotonic() - t, flush=True)"
    )
    run = subprocess.run([sys.executable, "-c", code, "/dev/null"], check=True, capture_output=True)
    alone = float(run.stdout.split()[1])
    kept.start(sys.executable, "-c", code, "/dev/stderr", log_bytes=4 << 20)
    await kept.over(3 * seconds + 20)
    text = b"".join(f.read_bytes() for f in sorted(kept.directory.glob("x.log*"), reverse=True))
    took = float(text.rpartition(b"took ")[2].split()[0])
    print(f"\n{seconds * 50_000:.0f} lines: {alone:.2f} s into nothing, {took:.2f} s into the log")
    assert took < 1.2 * alone + 0.1
    assert sum(f.stat().st_size for f in kept.directory.glob("x.log*")) <= 3 * (4 << 20)


async def test_it_is_small(kept: Kept) -> None:
    kept.python("import time; print('up'); time.sleep(1000)")
    await kept.says("up")
    fields = Path(f"/proc/{kept.shims[-1].pid}/stat").read_bytes().rpartition(b")")[2].split()
    spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    assert spent < 0.2, "CPU time; 30 ms on an idle machine"
    status = Path(f"/proc/{kept.shims[-1].pid}/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak < 15 * 1024, f"{peak} kB"
    kept.shims[-1].terminate()
    await kept.over()


async def test_many_short_lives_leave_no_zombie(short_dir: Path) -> None:
    """Each leaves a grandchild that ends a moment later; the shim, its subreaper, takes them all."""
    k = Kept(short_dir)
    k.python(
        "import subprocess,time\nfor _ in range(100): subprocess.run(['sh','-c','sleep 0.01 &'])\n"
        "print('up')\ntime.sleep(1000)"
    )
    await k.says("up")

    def zombies() -> int:
        found = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                    found += fields[0] == b"Z" and int(fields[1]) == k.shims[-1].pid
        return found

    await until(lambda: zombies() == 0, 2, "no zombie")
    k.shims[-1].terminate()
    await k.over()

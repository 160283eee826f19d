"""One life of a process: the shim that keeps it, what the shim wrote down, and how to find it again.

A life is a directory `run/NAME@NUMBER`. These are the truth about what runs: a daemon that starts reads
them, not its own memory.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from eccon import shim
from eccon.config import Limits, Topology
from eccon.launch import ProcessSpec
from eccon.model import Exit
from eccon.paths import ClusterPaths
from eccon.supervisor.identity import Identity, boot_id, start_ticks

__all__ = ["Life", "LifeError", "begin", "find", "keep_reserve"]

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
RESERVE = 1 << 18
"""Bytes that a new life needs, several times."""


class LifeError(Exception):
    """A process could not be started; the message says why. `no_room`: the disk is full."""

    def __init__(self, message: str, *, no_room: bool = False) -> None:
        super().__init__(message)
        self.no_room = no_room


class Watch:
    """Tells when a process ends. Holds a pidfd."""

    def __init__(self, who: Identity) -> None:
        self.who = who
        self.ended = asyncio.Event()
        self.on_end: Callable[[], None] | None = None
        self._fd = who.open()
        if self._fd is None:
            self.ended.set()
        else:
            asyncio.get_running_loop().add_reader(self._fd, self._over)

    def _over(self) -> None:
        self.close()
        self.ended.set()
        if self.on_end:
            self.on_end()

    def close(self) -> None:
        """Stops watching."""
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None


class Life:
    """A process that was started once, with its shim. Made by `begin` or `find`."""

    def __init__(self, directory: Path, name: str, shim_pid: int) -> None:
        self.directory = directory
        self.name = name
        self.started_at = time.time()
        self.main: Watch | None = None
        self.shim = Watch(Identity(shim_pid, start_ticks(shim_pid) or -1, boot_id()))
        self.read()

    @property
    def id(self) -> str:
        """Unlike any other life's."""
        return self.directory.name

    @property
    def pid(self) -> int | None:
        """Of the process itself."""
        return self.main.who.pid if self.main else None

    @property
    def died(self) -> bool:
        """Whether the process itself has ended; its tree may still live."""
        return self.main is None or self.main.ended.is_set()

    def read(self) -> dict[str, object]:
        """What the shim says of itself and of the process, now."""
        status = shim.read_whole(str(self.directory / "status.json"))
        if self.main is None and status.get("pid"):
            pid, start = int(str(status["pid"])), int(str(status["start"]))
            self.main = Watch(Identity(pid, start, str(status["boot"])))
            self.started_at = float(str(status.get("started_at", self.started_at)))
        return status

    def on_end(self, call: Callable[[], None]) -> None:
        """Calls when the process ends, and when its shim does."""
        self.shim.on_end = call
        if self.main:
            self.main.on_end = call

    @property
    def dropped(self) -> int:
        """Log lines that the shim could not write."""
        return int(str(self.read().get("dropped", 0)))

    @property
    def unkillable(self) -> list[int]:
        """Processes that KILL did not end."""
        pids = self.read().get("unkillable")
        return [int(str(p)) for p in pids] if isinstance(pids, list) else []

    def exit(self) -> Exit | None:
        """How it ended; None while it has not, or the shim was killed before it could say."""
        end = shim.read_whole(str(self.directory / "exit.json"))
        if "at" not in end:
            return None
        code, number = end.get("code"), end.get("signal")
        return Exit(
            at=float(str(end["at"])),
            code=None if code is None else int(str(code)),
            signal=None if number is None else int(str(number)),
            asked=bool(end.get("asked")),
        )

    def stop(self) -> None:
        """Asks the shim to end the whole tree: TERM, grace, KILL."""
        self.shim.who.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Asks the shim to end the whole tree at once."""
        self.shim.who.signal(signal.SIGUSR1)

    async def revive_shim(self, env: Mapping[str, str]) -> None:
        """A new shim in place of a killed one: drains the log on, waits, and cleans up after the process."""
        self.shim.close()
        pid = await _spawn_shim(self.directory, env)
        self.shim = Watch(Identity(pid, start_ticks(pid) or -1, boot_id()))
        self.read()

    @property
    def over(self) -> bool:
        """Whether nothing of it lives: the shim has ended, and not before it had cleaned up."""
        return self.shim.ended.is_set() and bool(self.read().get("clean"))

    def close(self) -> None:
        """Stops watching; the process goes on."""
        self.shim.close()
        if self.main:
            self.main.close()


def environment(spec: ProcessSpec) -> dict[str, str]:
    """The process's: the daemon's own less `unset`, and `spec.env` over it."""
    ours = {k: v for k, v in os.environ.items() if k not in spec.unset and k != shim.MARKER}
    return ours | spec.env


def limits(wanted: Limits) -> dict[str, int]:
    """Those that are set, by the kernel's names."""
    named = {
        "NOFILE": wanted.files,
        "CORE": wanted.core_bytes,
        "MEMLOCK": wanted.locked_bytes,
        "AS": wanted.memory_bytes,
        "NPROC": wanted.processes,
    }
    return {name: value for name, value in named.items() if value is not None}


async def begin(topology: Topology, paths: ClusterPaths, spec: ProcessSpec) -> Life:
    """Starts the process of `spec` in a new life. Directories of its earlier lives go.

    Raises:
        LifeError: it cannot be started.
    """
    earlier = _lives_of(paths, spec.name)
    number = 1 + max((int(d.name.rpartition("@")[2]) for d in earlier), default=0)
    directory = paths.run / f"{spec.name}@{number}"
    settings = {
        "argv": list(spec.argv),
        "cwd": spec.cwd,
        "log": str(paths.logs / f"{spec.name}.log"),
        "log_bytes": topology.supervisor.log_bytes,
        "log_files": topology.supervisor.log_files,
        "grace_s": topology.supervisor.stop_grace_s,
        "affinity": list(spec.cpus),
        "rlimits": limits(topology.supervisor.limits),
    }
    try:
        pid = await _begin_in(directory, settings, environment(spec))
    except LifeError as e:
        if not e.no_room:
            raise
        # The last process has room to begin whatever fills the disk.
        paths.reserve.unlink(missing_ok=True)
        pid = await _begin_in(directory, settings, environment(spec))
    for old in earlier:
        shutil.rmtree(old, ignore_errors=True)
    keep_reserve(paths)
    return Life(directory, spec.name, pid)


def keep_reserve(paths: ClusterPaths) -> None:
    """Room on the disk that is given up when a process could not be started for lack of it."""
    with contextlib.suppress(OSError):
        if not paths.reserve.exists() or paths.reserve.stat().st_size < RESERVE:
            paths.reserve.write_bytes(b"\0" * RESERVE)


def _lay_out(directory: Path, settings: Mapping[str, object]) -> None:
    directory.mkdir(mode=0o700)
    (directory / "spec.json").write_bytes(msgspec.json.encode(settings))


async def _begin_in(directory: Path, settings: Mapping[str, object], env: Mapping[str, str]) -> int:
    """The shim's pid; without it nothing is left behind.

    Raises:
        LifeError: why not.
    """
    try:
        _lay_out(directory, settings)
        return await _spawn_shim(directory, env)
    except OSError as e:
        shutil.rmtree(directory, ignore_errors=True)
        msg = f"cannot start it: {e.strerror or e}"
        raise LifeError(msg, no_room=e.errno in NO_ROOM) from e
    except LifeError as e:
        if e.no_room:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def find(paths: ClusterPaths) -> dict[str, Life]:
    """Every life that may still have something alive, by process name: the newest one of each."""
    found: dict[str, Life] = {}
    for directory in sorted(paths.run.iterdir(), key=lambda d: int(d.name.rpartition("@")[2] or 0)):
        name = directory.name.rpartition("@")[0]
        status = shim.read_whole(str(directory / "status.json"))
        if not name or not (directory / "log.fifo").exists():
            continue
        shim_pid = int(str(status.get("shim", 0)))
        if status.get("boot") not in {None, boot_id()} or start_ticks(shim_pid) != status.get("shim_start"):
            shim_pid = 0
        if earlier := found.pop(name, None):
            earlier.close()
        found[name] = Life(directory, name, shim_pid)
    return found


def _lives_of(paths: ClusterPaths, name: str) -> list[Path]:
    return [d for d in paths.run.iterdir() if d.name.rpartition("@")[0] == name]


async def _spawn_shim(directory: Path, env: Mapping[str, str]) -> int:
    """Starts a shim on a life and waits until it runs the process, or has failed to. Its pid.

    Raises:
        LifeError: with the shim's own words.
        OSError: the shim itself could not be started.
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        with (directory / "shim.err").open("ab") as err:
            # Not waited for here: `reaper` does that, or init when this daemon is gone.
            process = subprocess.Popen(  # noqa: ASYNC220  takes a millisecond, and keeps SIGCHLD in order
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-E",
                    shim.__file__,
                    str(directory / "spec.json"),
                    str(write_end),
                ],
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                cwd="/",
                env=dict(env),
                start_new_session=True,
                pass_fds=(write_end,),
            )
    finally:
        os.close(write_end)
    # The reaper takes its status; keep Popen from warning about a process that is meant to outlive it.
    process.returncode = 0
    line = await _read_line(read_end)
    answer = msgspec.json.decode(line) if line else {"error": _last_words(directory)}
    if answer.get("error"):
        raise LifeError(str(answer["error"]), no_room=answer.get("errno") in NO_ROOM)
    return process.pid


async def _read_line(fd: int) -> bytes:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        return await reader.readline()
    finally:
        transport.close()


def _last_words(directory: Path) -> str:
    with contextlib.suppress(OSError, IndexError):
        return "its shim failed: " + (directory / "shim.err").read_text(errors="replace").splitlines()[-1]
    return "its shim failed without a word"

"""Stands between the daemon and one managed process, and outlives the daemon: `python -I -S -E shim.py SPEC`.

It is one file on purpose: run by path, isolated from every import but the standard library's, so that an
upgrade under way, a broken environment or another version of eccon cannot keep it from doing its work.

It starts the process in a session of its own, drains its output into a rotated log, waits for it, ends what
it leaves behind and writes down how it ended. Only the standard library, so that it is small and starts fast.

The specification's directory is the *life*: `status.json` (who runs), `exit.json` (how it ended), `log.fifo`.
Started again on a life that has begun (because the first shim was killed) it adopts the process: it drains on
and waits, but cannot learn the exit status. Signals: TERM stops the tree within the grace, USR1 kills it now.

The process's environment is the shim's own plus `ECCON_LIFE`, so that no secret lies in a file.
"""

# pathlib would cost a fifth of its memory and of its start-up:
# ruff: noqa: PTH105, PTH108, PTH115, PTH118, PTH120, PTH123, PTH208

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time

MARKER = "ECCON_LIFE"
RESERVED = 2048
"""Bytes that status and exit files hold from the start, so that they can be written on a full disk."""
CHUNK = 1 << 18
LEFT_GRACE_S = 2.0
"""What a dead process leaves behind gets this long between TERM and KILL."""
PR_SET_CHILD_SUBREAPER = 36
F_SETPIPE_SZ = 1031


def write_whole(path: str, value: dict[str, object]) -> None:
    """Replaces `path` atomically, or overwrites it in place when the disk has no room for a second one."""
    data = json.dumps(value).encode().ljust(RESERVED) + b"\n"
    fresh = path + ".new"
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, "short write")
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(fd, data, 0)
            finally:
                os.close(fd)


def read_whole(path: str) -> dict[str, object]:
    """What `write_whole` wrote; empty when there is nothing yet."""
    try:
        with open(path, "rb") as f:
            value = json.loads(f.read() or b"{}")
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def boot_id() -> str:
    """Of the running kernel: pids of another boot mean nothing."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip()


class Stat:
    """The few fields of `/proc/PID/stat` that say who a process is."""

    def __init__(self, pid: int) -> None:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
        self.pid = pid
        self.zombie = fields[0] in {b"Z", b"X"}
        self.parent = int(fields[1])
        self.session = int(fields[3])
        self.start = int(fields[19])


def everyone() -> list[Stat]:
    """Every process of the host that lives."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = Stat(int(name))
                if not stat.zombie:
                    found.append(stat)
    return found


def marked(pid: int, life: str) -> bool:
    """Whether a process bears this life's mark or writes to its log (a process title overwrites the mark)."""
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{fd}") == f"{life}/log.fifo":
                return True
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as f:
        return f"{MARKER}={life}".encode() in f.read().split(b"\0")
    return False


class Log:
    """A log file of bounded size with a bounded number of predecessors. Never blocks, never raises."""

    def __init__(self, path: str, limit: int, files: int) -> None:
        self.path = path
        self.limit = limit
        self.files = files
        self.fd = -1
        self.size = 0
        self.dropped = 0
        self.untold = 0
        self.reason = ""
        self.at_line_start = True

    def write(self, data: bytes) -> None:
        """Appends, rotating at a line's end."""
        while data:
            if self.fd < 0 and not self._open():
                self._lose(data)
                return
            room = self.limit - self.size
            part = data
            if len(data) > room:
                cut = data.rfind(b"\n", 0, max(room, 0)) + 1
                part = data[: cut or (room if self.size == 0 else 0)]
            data = data[len(part) :]
            if part:
                self._append(part)
            if data:
                self._rotate()

    def note(self, text: str) -> None:
        """A line of our own."""
        self.write((b"" if self.at_line_start else b"\n") + f"eccon: {text}\n".encode())

    def _append(self, part: bytes) -> None:
        if self.untold:
            told = b"" if self.at_line_start else b"\n"
            told += f"eccon: {self.untold} lines lost here: {self.reason}\n".encode()
        else:
            told = b""
        text = told + part
        done = 0
        try:
            while done < len(text):
                done += os.write(self.fd, text[done:])
        except OSError as e:
            self._failed(e, part)
            return
        self.untold = 0
        self.size += done
        self.at_line_start = part.endswith(b"\n")

    def _failed(self, error: OSError, part: bytes) -> None:
        self.reason = os.strerror(error.errno or 0)
        # Part of it may have been written; cut that off, so that what is kept are whole lines.
        with contextlib.suppress(OSError):
            os.ftruncate(self.fd, self.size)
        self._lose(part)

    def _lose(self, part: bytes) -> None:
        lines = max(part.count(b"\n"), 1)
        self.dropped += lines
        self.untold += lines

    def _open(self) -> bool:
        try:
            self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self.size = os.fstat(self.fd).st_size
        except OSError as e:
            self.reason = os.strerror(e.errno or 0)
            return False
        return True

    def _rotate(self) -> None:
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(OSError):
            if self.files == 1:
                os.unlink(self.path)
            for n in range(self.files - 1, 0, -1):
                older = f"{self.path}.{n}"
                newer = f"{self.path}.{n - 1}" if n > 1 else self.path
                with contextlib.suppress(FileNotFoundError):
                    os.replace(newer, older)


class Shim:
    """One life, from start or adoption to its end."""

    def __init__(self, spec_path: str) -> None:
        # As the kernel names it: an open file of ours is known by its real path.
        self.life = os.path.dirname(os.path.realpath(spec_path))
        self.spec = read_whole(spec_path)
        self.status_path = os.path.join(self.life, "status.json")
        self.exit_path = os.path.join(self.life, "exit.json")
        limit, files = int(str(self.spec["log_bytes"])), int(str(self.spec["log_files"]))
        self.log = Log(str(self.spec["log"]), limit, files)
        self.grace = float(str(self.spec["grace_s"]))
        self.status: dict[str, object] = {}
        self.main = 0
        self.main_fd = -1
        """pidfd of an adopted process, which is not our child."""
        self.fifo = -1
        self.errno = 0
        """Of what kept the process from being started, if it was the disk."""
        self.ended = False
        self.asked = False
        self.kill_at: float | None = None
        self.next_scan = 0.0
        self.killing_since: float | None = None
        self.sessions: set[int] = set()
        self.strangers: set[tuple[int, int]] = set()
        """Those that bear no mark, by pid and start: looking is dear."""
        self.umask = 0o022
        self.told_dropped = 0
        self.told_at = 0.0

    def run(self, ready_fd: int) -> int:
        """The whole life; the shim's own exit code."""
        lock = os.open(os.path.join(self.life, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 3
        if ready_fd >= 0:
            os.set_inheritable(ready_fd, False)
        wake = self._prepare()
        fifo, problem = self._begin()
        if ready_fd >= 0:
            with contextlib.suppress(OSError):
                answer = {"pid": self.main, "error": problem, "errno": self.errno}
                os.write(ready_fd, json.dumps(answer).encode() + b"\n")
            os.close(ready_fd)
        if not problem:
            self._serve(fifo, wake)
        return 0

    def _prepare(self) -> int:
        """Signals into a pipe, orphans to us, nothing inherited. Returns the pipe's reading end."""
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.umask = os.umask(0o077)
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, self._signalled)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        return read_end

    def _signalled(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if number == signal.SIGCHLD or (self.ended and number == signal.SIGTERM):
            return
        if number == signal.SIGUSR1:
            self.kill_at = now
        elif not self.asked:
            self.kill_at = now + self.grace if self.kill_at is None else self.kill_at
            self._send_main(signal.SIGTERM)
            # A stopped process cannot act on TERM.
            self._send_main(signal.SIGCONT)
        if not self.asked:
            self.asked = True
            self.status["stopping_at"] = time.time()
            self.status["kill_in_s"] = max(0.0, (self.kill_at or now) - now)
        self.next_scan = 0.0

    def _begin(self) -> tuple[int, str]:
        """Starts the process, or adopts it when this life has a fifo. The fifo, and what went wrong."""
        path = os.path.join(self.life, "log.fifo")
        try:
            os.mkfifo(path, 0o600)
            begun = False
        except FileExistsError:
            begun = True
        except OSError as e:
            return -1, f"cannot make {path}: {e.strerror}"
        # Open for both, so that it never reports a hang-up and never lacks a reader.
        fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(fifo, F_SETPIPE_SZ, 1 << 20)
        if begun:
            self._adopt()
            return fifo, ""
        try:
            for reserved in (self.status_path, self.exit_path):
                with open(reserved, "wb") as f:
                    f.write(b"{}".ljust(RESERVED) + b"\n")
        except OSError as e:
            # What runs must be written down somewhere, or nobody would ever find it again.
            os.unlink(path)
            self.errno = e.errno or 0
            return fifo, f"cannot write to {self.life}: {e.strerror}"
        return fifo, self._start()

    def _adopt(self) -> None:
        self.status = read_whole(self.status_path)
        pid = int(str(self.status.get("pid") or 0))
        if not pid:
            # The first shim was killed between fork and writing: the mark says which process it was.
            leaders = [s for s in everyone() if s.session == s.pid and marked(s.pid, self.life)]
            pid = leaders[0].pid if leaders else 0
        try:
            self.main_fd = os.pidfd_open(pid)
            stat = Stat(pid)
            same_boot = self.status.get("boot", boot_id()) == boot_id()
            if stat.zombie or not same_boot or stat.start != self.status.get("start", stat.start):
                raise ProcessLookupError
        except (OSError, ValueError):
            if self.main_fd >= 0:
                os.close(self.main_fd)
                self.main_fd = -1
            # Gone, or another process with its number: only what bears the mark is ours, and whoever is
            # left in its session.
            if self._session_is_old(pid):
                self.sessions.add(pid)
            self._main_ended(None, None)
            return
        self.main = pid
        self.sessions.add(pid)
        self._describe(stat.start, adopted=True)
        self.log.note("log taken over by a new shim; the exit status will be unknown")

    def _session_is_old(self, pid: int) -> bool:
        """Whether the session that a dead leader's number names is still its own.

        The kernel does not give away a number that names a session: while no other process has it, it is.
        """
        if not pid or self.status.get("boot") != boot_id():
            return False
        try:
            return Stat(pid).start == self.status.get("start")
        except OSError:
            return True

    def _start(self) -> str:
        argv = [str(a) for a in _list(self.spec["argv"])]
        error_read, error_write = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            self._become(argv, error_write)
        os.close(error_write)
        problem = b""
        while part := os.read(error_read, 4096):
            problem += part
        os.close(error_read)
        if problem:
            os.waitpid(pid, 0)
            text = problem.decode(errors="replace")
            self.log.note(text)
            write_whole(self.exit_path, {"at": time.time(), "code": 127, "error": text})
            return text
        self.main = pid
        self.sessions.add(pid)
        with contextlib.suppress(OSError):
            self._describe(Stat(pid).start, adopted=False)
        self.log.note(f"started pid {pid}")
        if self.asked:
            self._send_main(signal.SIGTERM)
        return ""

    def _become(self, argv: list[str], error_fd: int) -> None:
        """In the child: never returns."""
        doing = f"start {argv[0]} in {self.spec['cwd']}"
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDONLY)
            out = os.open(os.path.join(self.life, "log.fifo"), os.O_RDWR)
            for source, target in ((null, 0), (out, 1), (out, 2)):
                os.dup2(source, target)
            for fd in (null, out):
                if fd > 2:
                    os.close(fd)
            signal.set_wakeup_fd(-1)
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.umask(self.umask)
            start, doing = doing, f"pin it to CPUs {self.spec.get('affinity')}"
            if cpus := _list(self.spec.get("affinity")):
                os.sched_setaffinity(0, [int(str(c)) for c in cpus])
            limits = self.spec.get("rlimits")
            for name, value in limits.items() if isinstance(limits, dict) else ():
                number = getattr(resource, f"RLIMIT_{name}")
                hard = resource.getrlimit(number)[1]
                doing = f"set the limit {name} to {value}, with {hard} as the most that is allowed"
                resource.setrlimit(number, (int(value), hard))
            doing = start
            os.chdir(str(self.spec["cwd"]))
            os.execvpe(  # noqa: S606  no shell is the point
                argv[0], argv, {**os.environ, MARKER: self.life}
            )
        except BaseException as e:  # noqa: BLE001  whatever it is, the parent must hear of it
            reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
            os.write(error_fd, f"cannot {doing}: {reason}".encode())
        finally:
            os._exit(127)

    def _describe(self, start: int, *, adopted: bool) -> None:
        self.status |= {"pid": self.main, "start": start, "boot": boot_id(), "shim": os.getpid()}
        self.status |= {"shim_start": Stat(os.getpid()).start, "adopted": adopted}
        self.status.setdefault("started_at", time.time())
        write_whole(self.status_path, self.status)

    def _serve(self, fifo: int, wake: int) -> None:
        self.fifo = fifo
        poll = select.poll()
        for fd in (fifo, wake, self.main_fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(self._patience())}
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            self._reap()
            if self.main_fd in ready and not self.ended:
                poll.unregister(self.main_fd)
                self._main_ended(None, None)
            if fifo in ready:
                self._pump(fifo, 16)
            if self._advance():
                break
            self._tell()
        while self._pump(fifo, 64):
            pass
        self._reap()
        self.status |= {"dropped": self.log.dropped, "clean": True}
        write_whole(self.status_path, self.status)

    def _patience(self) -> int | None:
        """Milliseconds until something is due."""
        if self.ended or self.kill_at is not None:
            return 50
        return 1000 if self.log.dropped != self.told_dropped else None

    def _pump(self, fifo: int, chunks: int) -> bool:
        """Drains up to `chunks` pieces; whether there may be more."""
        for _ in range(chunks):
            try:
                data = os.read(fifo, CHUNK)
            except BlockingIOError:
                return False
            self.log.write(data)
        return True

    def _reap(self) -> None:
        """Every child that ended, ours and those that were left to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.main and not self.ended:
                code = os.waitstatus_to_exitcode(status)
                self._main_ended(code if code >= 0 else None, -code if code < 0 else None)

    def _main_ended(self, code: int | None, number: int | None) -> None:
        self.ended = True
        self.main = 0
        now = time.monotonic()
        end: dict[str, object] = {"at": time.time(), "code": code, "signal": number, "asked": self.asked}
        if "at" not in read_whole(self.exit_path):
            write_whole(self.exit_path, end)
        # What it said last stands before the note of its end.
        if self.fifo >= 0:
            self._pump(self.fifo, 64)
        how = f"signal {number}" if number else "exit status unknown" if code is None else f"exit code {code}"
        self.log.note(f"ended: {how}")
        self.kill_at = now + min(LEFT_GRACE_S, self.grace) if self.kill_at is None else self.kill_at
        self.kill_at = min(self.kill_at, now + LEFT_GRACE_S)
        self.next_scan = 0.0
        for stat in self._members():
            self._send_exactly(stat, signal.SIGTERM)
            self._send_exactly(stat, signal.SIGCONT)

    def _advance(self) -> bool:
        """Takes the stop further. True when nothing of the tree is left."""
        now = time.monotonic()
        if (not self.ended and self.kill_at is None) or now < self.next_scan:
            return False
        if not self.ended and self.kill_at is not None and now < self.kill_at:
            return False
        members = self._members()
        if not members and self.ended:
            return True
        if self.kill_at is not None and now >= self.kill_at:
            if self.killing_since is None:
                self.killing_since = now
            for stat in members:
                self._send_exactly(stat, signal.SIGKILL)
            stuck = now - self.killing_since > 5
            if stuck and members:
                self.status["unkillable"] = [s.pid for s in members]
                write_whole(self.status_path, self.status)
            self.next_scan = now + (1.0 if stuck else 0.02)
        else:
            self.next_scan = now + 0.05
        return False

    def _members(self) -> list[Stat]:
        """The tree: what descends from us or the process, shares a session with it, or bears its mark."""
        here = everyone()
        own = os.getpid()
        # Never 0: that is the parent, and the session, of the kernel's own threads.
        inside = {own, self.main} - {0}
        found: dict[int, Stat] = {}
        grown = True
        while grown:
            grown = False
            for s in here:
                if s.pid == own or s.pid in found:
                    continue
                mine = s.pid == self.main or s.parent in inside or s.session in self.sessions
                who = (s.pid, s.start)
                if not mine and who not in self.strangers:
                    mine = marked(s.pid, self.life)
                if not mine:
                    self.strangers.add(who)
                    continue
                found[s.pid] = s
                inside.add(s.pid)
                self.sessions |= {s.session} - {0, os.getsid(0)}
                grown = True
        # A session without members cannot get new ones, and its number may come to name a stranger's.
        self.sessions &= {s.session for s in found.values()}
        return list(found.values())

    def _send_main(self, number: int) -> None:
        """To the process itself: a child cannot lose its number unseen, an adopted one is held by a pidfd."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.main_fd >= 0:
                signal.pidfd_send_signal(self.main_fd, number)
            elif self.main > 0:
                os.kill(self.main, number)

    @staticmethod
    def _send_exactly(who: Stat, number: int) -> None:
        """To the process that was seen, not to one that has its number since."""
        try:
            fd = os.pidfd_open(who.pid)
        except OSError:
            return
        try:
            if Stat(who.pid).start == who.start:
                signal.pidfd_send_signal(fd, number)
        except OSError:
            return
        finally:
            os.close(fd)

    def _tell(self) -> None:
        """Lines that were lost, into the status; at most once a second."""
        now = time.monotonic()
        if self.log.dropped != self.told_dropped and now - self.told_at >= 1:
            self.told_dropped, self.told_at = self.log.dropped, now
            self.status["dropped"] = self.log.dropped
            write_whole(self.status_path, self.status)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def main() -> int:
    """`shim.py SPEC [READY_FD]`; one JSON line goes to READY_FD when the process runs or could not."""
    return Shim(sys.argv[1]).run(int(sys.argv[2]) if len(sys.argv) > 2 else -1)


if __name__ == "__main__":
    sys.exit(main())

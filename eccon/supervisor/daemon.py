"""The daemon of one cluster: takes the lock, wires the parts, serves the control API until it is told to end.

Ending is not stopping: at SIGTERM the processes go on, and the next daemon finds them. `shutdown` stops
them first.
"""

import asyncio
import contextlib
import fcntl
import logging
import logging.handlers
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvicorn

from eccon import config, launch
from eccon.config import Topology
from eccon.model import ClusterInfo
from eccon.paths import ClusterPaths, for_cluster
from eccon.supervisor import api, lives, reaper, store
from eccon.supervisor.board import Board
from eccon.supervisor.cluster import Cluster
from eccon.supervisor.figures import Figures
from eccon.supervisor.guardfeed import GuardFeed
from eccon.supervisor.listener import Listener
from eccon.supervisor.logs import DAEMON, log_path
from eccon.supervisor.probe import Prober
from eccon.supervisor.proxylink import ProxyLink
from eccon.supervisor.traces import Traces
from eccon.supervisor.twins import Twins
from eccon.supervisor.waiting import happened
from eccon.supervisor.worries import Worries

__all__ = ["AlreadyRunningError", "Daemon"]

log = logging.getLogger(__name__)
LOG_BYTES = 2**20
LOCK_BYTES = 16


class AlreadyRunningError(Exception):
    """Another daemon has the cluster; the message names it."""


class Daemon:
    """See the module.

    Args:
        config_path: the cluster's configuration.
        linger_s: end the cluster when no console has been attached for this long; None: never.
        ephemeral: a directory of this cluster alone, removed at the end; SIGTERM then stops the cluster.

    Raises:
        ConfigError: the configuration cannot be used.
        PathsError: the state directory cannot be.
        AlreadyRunningError: another daemon has the cluster.
    """

    def __init__(
        self, config_path: Path, linger_s: float | None = None, ephemeral: Path | None = None
    ) -> None:
        self.topology = config.load(config_path)
        self.paths = for_cluster(self.topology.name)
        self.linger_s = linger_s
        self.ephemeral = ephemeral
        self._lock = _take_lock(self.paths)
        self._socket = _bind(self.paths.control_socket)
        _log_to(log_path(self.paths, DAEMON))
        self._end = asyncio.Event()
        self._stop_first = False
        self._consoles = api.Consoles()

    async def run(self, ready_fd: int | None = None) -> None:
        """Until the end. `ready_fd` gets a line when the control API answers."""
        loop = asyncio.get_running_loop()
        reaper.install()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        self._write_logging_config()
        lives.keep_reserve(self.paths)
        saved, complaint = store.read(self.paths.state_file)
        board = Board(_info(self.topology, self.paths))
        board.restore_events(saved.events)
        async with Prober(self.topology.supervisor.probe_timeout_s) as prober:
            link = ProxyLink(self.paths.admin_socket)
            traces = Traces(board)
            listener = Listener(self.paths, board, traces, saved)
            cluster = Cluster(self.topology, self.paths, board, prober, link, listener, saved)
            feed = GuardFeed(self.paths.guard_socket, listener.guard_event, listener.guard_lost)
            figures = Figures(cluster, traces)
            if complaint:
                board.log("cluster", complaint, "error")
            server = _Server(
                uvicorn.Config(
                    api.build(cluster, self._consoles, self.shut_down),
                    http=api.PeerChecked,
                    ws="none",
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    date_header=False,
                    timeout_graceful_shutdown=2,
                )
            )
            running = sum(1 for o in cluster.owners.values() if o.life and not o.life.died)
            board.log("cluster", f"daemon started, pid {os.getpid()}; {running} processes found running")
            cluster.start()
            tasks = [
                asyncio.create_task(work, name=name)
                for name, work in (
                    ("store", cluster.store.run()),
                    ("proxy link", link.run()),
                    ("logs", listener.read_logs()),
                    ("usage", listener.take_figures()),
                    ("devices", cluster.watch_devices()),
                    ("figures", figures.run()),
                    ("worries", Worries(cluster).run()),
                    ("twins", Twins(cluster).run()),
                    ("linger", self._linger()),
                )
            ]
            serving = asyncio.create_task(server.serve(sockets=[self._socket]), name="api")
            while not (server.started or serving.done()):  # noqa: ASYNC110  uvicorn has no event for it
                await asyncio.sleep(0.005)
            _say(ready_fd, "ok")
            for task in (*tasks, serving):
                task.add_done_callback(self._task_ended)
            await self._end.wait()
            cluster.ending = self._stop_first
            if self._stop_first:
                await cluster.down()
            for task in (*tasks, serving):
                task.remove_done_callback(self._task_ended)
            board.close()
            server.over.set()
            await asyncio.wait({serving}, timeout=5)
            for task in (*tasks, serving):
                task.cancel()
            await asyncio.gather(*tasks, serving, return_exceptions=True)
            stopped = not any(o.life for o in cluster.owners.values())
            await cluster.close()
            listener.close()
            feed.close()
        self._tidy(stopped)

    def _write_logging_config(self) -> None:
        """A full disk leaves the one of before, which is as good."""
        for named in (False, True):
            path = self.paths.logging_config(named=named)
            wanted = msgspec.json.encode(launch.logging_config(named=named))
            try:
                if path.read_bytes() == wanted:
                    continue
            except OSError:
                log.info("%s is written for the first time", path)
            try:
                store.write_atomically(path, wanted)
            except OSError as e:
                log.error("%s cannot be written: %s", path, e.strerror)

    def shut_down(self) -> None:
        """Stops the cluster, then ends."""
        self._stop_first = True
        self._end.set()

    def _signalled(self) -> None:
        if self.ephemeral or self.linger_s is not None:
            self._stop_first = True
        self._end.set()

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        """None of them ends by itself, and without one the daemon would be half blind: better a new one."""
        if not task.cancelled():
            log.critical("%s ended", task.get_name(), exc_info=task.exception())
        self._end.set()

    async def _linger(self) -> None:
        if self.linger_s is None:
            await asyncio.Event().wait()
            return
        while True:
            self._consoles.changed.clear()
            wait = None if self._consoles.attached else self.linger_s
            if not await happened(self._consoles.changed, wait):
                log.info("no console for %g s: the cluster ends", self.linger_s)
                self.shut_down()
                await asyncio.Event().wait()

    def _tidy(self, stopped: bool) -> None:
        """Leaves the state directory as the next daemon wants it; with all stopped, without a socket."""
        self._socket.close()
        with contextlib.suppress(OSError):
            self.paths.control_socket.unlink()
        if stopped:
            with contextlib.suppress(OSError):
                self.paths.admin_socket.unlink()
            if self.paths.sockets != self.paths.root:
                for directory in (self.paths.sockets, self.paths.sockets.parent):
                    with contextlib.suppress(OSError):
                        directory.rmdir()
        if self.ephemeral and stopped:
            logging.shutdown()
            shutil.rmtree(self.paths.root, ignore_errors=True)
            shutil.rmtree(self.ephemeral, ignore_errors=True)
        os.close(self._lock)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers (the daemon has its own) and without its ten wake-ups a second."""

    def __init__(self, settings: uvicorn.Config) -> None:
        super().__init__(settings)
        self.over = asyncio.Event()

    async def main_loop(self) -> None:
        """Until it is to end."""
        await self.over.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def _info(topology: Topology, paths: ClusterPaths) -> ClusterInfo:
    return ClusterInfo(
        name=topology.name,
        model=topology.model.served_name or topology.model.path,
        public_url=launch.public_url(topology),
        config_path=str(topology.path),
        state_dir=str(paths.root),
        daemon_pid=os.getpid(),
        daemon_started_at=time.time(),
    )


def _take_lock(paths: ClusterPaths) -> int:
    """By flock, not by a pid file: it goes with its holder, whatever kills it."""
    fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        holder = os.pread(fd, 100, 0).decode(errors="replace").strip() or "?"
        os.close(fd)
        msg = f"a daemon of this cluster runs already: pid {holder} ({paths.root})"
        raise AlreadyRunningError(msg) from e
    with contextlib.suppress(OSError):
        # In the place of the one before: a full disk has room for that.
        os.pwrite(fd, f"{os.getpid()}\n".ljust(LOCK_BYTES).encode(), 0)
        os.ftruncate(fd, LOCK_BYTES)
    return fd


def _bind(path: Path) -> socket.socket:
    """Ours before uvicorn sees it, with mode 0600: uvicorn would make it 0666. A stale one is in the way."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        s.bind(str(path))
    finally:
        os.umask(before)
    s.listen(128)
    s.setblocking(False)
    return s


def _log_to(path: Path) -> None:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _say(fd: int | None, line: str) -> None:
    if fd is not None:
        with contextlib.suppress(OSError):
            os.write(fd, line.encode() + b"\n")
            os.close(fd)

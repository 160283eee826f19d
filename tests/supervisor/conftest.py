"""A cluster of real processes in a directory of its own, and proof that nothing of it is left."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from eccon import shim
from eccon.client import Client, NotRunning
from eccon.model import ClusterState, Process, State
from eccon.paths import ClusterPaths, for_cluster
from eccon.supervisor import start_daemon

PROGRAMS = Path(__file__).parent / "programs"

CONFIG = """\
name = "t"
[model]
path = "m"
[launcher]
{launcher}
[devices]
kind = "none"
[connector]
port = {connector}
[pd]
port = {pd}
[encoders]
count = {encoders}
port = {encoder}
[proxy]
host = "127.0.0.1"
port = {proxy}
[supervisor]
stop_grace_s = {grace}
drain_timeout_s = 3
backoff_s = 0.2
backoff_max_s = 0.5
failures = {failures}
probe_interval_s = 0.2
[env]
{env}
"""


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports, apart from the guide's and from those given to clients."""
    for _ in range(200):
        base = random.randrange(11000, 18900 - count)
        held: list[socket.socket] = []
        try:
            for port in range(base, base + count):
                s = socket.socket()
                held.append(s)
                s.bind(("", port))
        except OSError:
            continue
        finally:
            for s in held:
                s.close()
        return base
    msg = "no free ports"
    raise OSError(msg)


async def until(true: Callable[[], bool | Awaitable[bool]], timeout: float = 20.0, what: str = "it") -> None:
    """Polls a condition of the outside world."""
    deadline = time.monotonic() + timeout
    while True:
        answer = true()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert time.monotonic() < deadline, f"{what} did not become true within {timeout} s"
        await asyncio.sleep(0.02)


def marked(root: Path) -> list[int]:
    """Processes that live and were started for a life below `root`, shims included."""
    found = []
    for s in shim.everyone():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{s.pid}/cmdline").read_bytes() + Path(f"/proc/{s.pid}/environ").read_bytes()
            if str(root).encode() in words:
                found.append(s.pid)
    return found


@contextlib.contextmanager
def sleeper(**env: str) -> Iterator[int]:
    """A process that does nothing, for as long as the context lasts. Its pid."""
    process = subprocess.Popen(["sleep", "1000"], env=os.environ | env)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


class Site:
    """One cluster's directory, configuration and daemon."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = directory / "eccon.toml"
        self.state_dir = directory / "s"
        self.base = free_ports(12)
        (directory / "m").mkdir()
        (directory / "m" / "config.json").write_text("{}")

    @property
    def paths(self) -> ClusterPaths:
        """Of the cluster."""
        return for_cluster("t")

    @property
    def client(self) -> Client:
        """Of its daemon."""
        return Client(self.paths.control_socket)

    def write(
        self,
        *,
        encoders: int = 2,
        grace: float = 3.0,
        failures: int = 4,
        launcher: str = "",
        more: str = "",
        **env: str,
    ) -> None:
        """The configuration. `env` goes to every process; `launcher` replaces the badly behaved server."""
        b = self.base
        self.config.write_text(
            CONFIG.format(
                launcher=launcher or f'vllm = "{PROGRAMS / "server.py"}"',
                proxy=b,
                pd=b + 1,
                connector=b + 2,
                encoder=b + 3,
                encoders=encoders,
                grace=grace,
                failures=failures,
                env="\n".join(f'{k} = "{v}"' for k, v in env.items()),
            )
            + more
        )

    async def start(self) -> Client:
        """The daemon."""
        await asyncio.to_thread(start_daemon, self.config)
        return self.client

    async def up(self, **options: object) -> Client:
        """The daemon and the cluster, with every process ready."""
        if not self.config.exists():
            self.write(**options)  # type: ignore[arg-type]
        client = await self.start()
        await client.up()
        await self.settled()
        return client

    async def see(self, true: Callable[[ClusterState], bool], timeout: float = 30.0) -> ClusterState:
        """Follows the events until the state is as wished."""

        async def follow() -> ClusterState:
            state: ClusterState | None = None
            async for item in self.client.changes():
                state = item if isinstance(item, ClusterState) else state.apply(item) if state else None
                if state and true(state):
                    return state
            msg = "the daemon ended"
            raise NotRunning(msg)

        try:
            return await asyncio.wait_for(follow(), timeout)
        except asyncio.TimeoutError:
            state = await self.client.state()
            rows = [f"{p.name} {p.state.value}: {p.reason}" for p in state.processes]
            rows += [f"{e.subject}: {e.text}" for e in state.events[-15:]]
            msg = "\n".join(["not seen; the state is", *rows])
            raise AssertionError(msg) from None

    async def settled(self) -> ClusterState:
        """Until every process is ready."""
        return await self.see(lambda s: all(p.state is State.READY for p in s.processes))

    async def process(self, name: str) -> Process:
        """One process, now."""
        process = (await self.client.state()).process(name)
        assert process is not None, f"no process {name}"
        return process

    async def down(self) -> None:
        """Everything, and the daemon."""
        with contextlib.suppress(NotRunning):
            await self.client.shutdown()
        await until(lambda: not self.left(), 30, "the end of every process")

    def sweep(self) -> None:
        """Whatever a failed test left."""
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left(self) -> list[int]:
        """Processes of this cluster that live."""
        return marked(self.directory)

    def daemon_pid(self) -> int:
        """As the lock says."""
        return int(self.paths.lock.read_text())


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A site that must be empty again at the end of the test."""
    with tempfile.TemporaryDirectory(prefix="ecc", dir="/tmp") as name:
        monkeypatch.setenv("ECCON_STATE_DIR", f"{name}/s")
        for variable in ("FAKE", "FAKE_PD", "FAKE_ENCODER", "ECCON_CONFIG"):
            monkeypatch.delenv(variable, raising=False)
        here = Site(Path(name))
        try:
            yield here
            await here.down()
        finally:
            here.sweep()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A temporary directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="ecc", dir="/tmp") as name:
        yield Path(name)


SIM = {
    "ECCON_SIM_START_S": "0.2",
    "ECCON_SIM_ENCODE_MS": "20",
    "ECCON_SIM_ENCODE_MS_PER_MPIX": "0",
    "ECCON_SIM_PREFILL_MS": "5",
    "ECCON_SIM_TOKEN_MS": "1",
}


async def serving(site: Site, **env: str) -> None:
    """The cluster up, and the proxy sending to every encoder."""
    site.write(launcher='kind = "sim"', failures=20, **SIM | env)  # type: ignore[arg-type]
    client = await site.start()
    await client.up()
    await site.see(lambda s: s.cluster.health == "ok")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Site]:
    """One for all tests here: starting it costs most."""
    with tempfile.TemporaryDirectory(prefix="ecc", dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECCON_STATE_DIR", f"{name}/s")
        site = Site(Path(name))
        try:
            asyncio.run(serving(site))
            yield site
            asyncio.run(site.down())
        finally:
            site.sweep()


@pytest.fixture
async def shared(cluster: Site) -> Site:
    """With encoder-0 and encoder-1, both well, whatever the test before left."""
    here = {p.name for p in (await cluster.client.state()).processes}
    for name in here - {"pd", "proxy", "encoder-0", "encoder-1"}:
        await cluster.client.remove(name)
    for _ in {"encoder-0", "encoder-1"} - here:
        await cluster.client.add()
    await cluster.see(lambda s: len(s.processes) == 4 and s.cluster.health == "ok")
    return cluster

"""Whatever is killed, and whenever: the cluster comes back to what was wanted; nothing twice, no orphan."""

import asyncio
import os
import pty
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

from eccon.client import NotRunning
from eccon.model import State
from tests.supervisor.conftest import Site, until

KILLS = int(os.environ.get("ECCON_TEST_KILLS", "8"))
VICTIMS = (
    "daemon",
    "console",
    "shim",
    "encoder's parent",
    "encoder's tree",
    "encoder's engine",
    "pd",
    "proxy",
)


class Console:
    """A console on a terminal of its own, begun again when it was killed."""

    def __init__(self, site: Site) -> None:
        self.argv = [sys.executable, "-m", "eccon", "attach", "--socket", str(site.paths.control_socket)]
        self.master, self.slave = pty.openpty()
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """If it does not run."""
        self._read()
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                self.argv,
                stdin=self.slave,
                stdout=self.slave,
                stderr=self.slave,
                start_new_session=True,
                env=os.environ | {"TERM": "xterm-256color"},
            )

    def kill(self) -> None:
        """It, and nothing else."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def end(self) -> None:
        """And its terminal."""
        self.kill()
        os.close(self.master)
        os.close(self.slave)

    def _read(self) -> None:
        """So that it does not wait for its terminal."""
        while select.select([self.master], [], [], 0)[0]:
            os.read(self.master, 1 << 16)


def command(pid: int) -> str:
    """As in /proc; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill(pid: int) -> None:
    """If it lives."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def servers(site: Site) -> list[int]:
    """All of the cluster but its console."""
    return [p for p in site.left() if " attach " not in command(p)]


async def strike(site: Site, victim: str, chance: random.Random, console: Console) -> None:
    """Kills one of them."""
    if victim == "console":
        console.kill()
        return
    if victim == "daemon":
        kill(site.daemon_pid())
        await until(lambda: not Path(f"/proc/{site.daemon_pid()}").exists(), 5, "the daemon's end")
        return
    if victim == "shim":
        if shims := [p for p in servers(site) if "shim.py" in command(p)]:
            kill(chance.choice(shims))
        return
    name = f"encoder-{chance.randrange(2)}" if victim.startswith("encoder") else victim
    process = await site.process(name)
    if process.pid is None:
        return
    tree = [p for p in servers(site) if p != process.pid and "shim.py" not in command(p)]
    tree = [p for p in tree if f"{name}@" in _life(p)]
    whom = {"encoder's engine": tree, "encoder's tree": [*tree, process.pid]}
    for pid in whom.get(victim, [process.pid]):
        kill(pid)


def _life(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((w.decode() for w in words if w.startswith(b"ECCON_LIFE=")), "")


async def test_the_cluster_returns_to_what_is_wanted(site: Site) -> None:
    await site.up(failures=100, FAKE="apart")
    expected = sorted(command(p).split(" --detach")[0].split("@")[0] for p in servers(site))
    console = Console(site)
    try:
        await many_kills(site, expected, console)
    finally:
        console.end()


async def many_kills(site: Site, expected: list[str], console: Console) -> None:
    """One after the other, often in the middle of a recovery."""
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    for n in range(KILLS):
        victims = chance.sample(VICTIMS, chance.choice((1, 1, 2)))
        told = f"seed {seed}, kill {n}: {victims}"
        try:
            console.begin()
            await asyncio.sleep(chance.choice((0.0, 0.05, 0.3)))
            for victim in victims:
                await strike(site, victim, chance, console)
        except NotRunning:
            pass
        if not Path(f"/proc/{site.daemon_pid()}").exists():
            await site.start()
        if chance.random() < 0.5:
            continue
        await whole(site, expected, told)
    await whole(site, expected, f"seed {seed}, at the end")


async def whole(site: Site, expected: list[str], told: str) -> None:
    """Everything ready, nothing missing, nothing twice."""
    if not Path(f"/proc/{site.daemon_pid()}").exists():
        await site.start()
    try:
        await site.see(lambda s: all(p.state is State.READY for p in s.processes), 40)

        def same() -> bool:
            here = [command(p).split(" --detach")[0].split("@")[0] for p in servers(site)]
            return sorted(here) == expected

        await until(same, 10, "every process once")
    except AssertionError as e:
        here = [f"{p} {command(p)}" for p in site.left()]
        raise AssertionError("\n".join([told, str(e), *here])) from e

"""Whatever is killed, and whenever: the cluster comes back to what was wanted; nothing twice, no orphan."""

import asyncio
import os
import random
import signal
from pathlib import Path

from eccon.client import NotRunning
from eccon.model import State
from tests.supervisor.conftest import Site, until

KILLS = int(os.environ.get("ECCON_TEST_KILLS", "8"))
VICTIMS = ("daemon", "shim", "encoder's parent", "encoder's tree", "encoder's engine", "pd", "proxy")


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


async def strike(site: Site, victim: str, chance: random.Random) -> None:
    """Kills one of them."""
    if victim == "daemon":
        kill(site.daemon_pid())
        await until(lambda: not Path(f"/proc/{site.daemon_pid()}").exists(), 5, "the daemon's end")
        return
    if victim == "shim":
        kill(chance.choice([p for p in site.left() if "shim.py" in command(p)]))
        return
    name = f"encoder-{chance.randrange(2)}" if victim.startswith("encoder") else victim
    process = await site.process(name)
    if process.pid is None:
        return
    tree = [p for p in site.left() if p != process.pid and "shim.py" not in command(p)]
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
    expected = sorted(command(p).split(" --detach")[0].split("@")[0] for p in site.left())
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    for n in range(KILLS):
        victims = chance.sample(VICTIMS, chance.choice((1, 1, 2)))
        told = f"seed {seed}, kill {n}: {victims}"
        try:
            # Often in the middle of a recovery.
            await asyncio.sleep(chance.choice((0.0, 0.05, 0.3)))
            for victim in victims:
                await strike(site, victim, chance)
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
            here = [command(p).split(" --detach")[0].split("@")[0] for p in site.left()]
            return sorted(here) == expected

        await until(same, 10, "every process once")
    except AssertionError as e:
        here = [f"{p} {command(p)}" for p in site.left()]
        raise AssertionError("\n".join([told, str(e), *here])) from e

"""What kills a PD, what only says so, and what an operator is told of it: on the stand-in."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from eccon.client import ControlError
from eccon.model import ClusterState, State
from eccon.supervisor import identity, ports
from tests.supervisor.conftest import Site, until
from tests.supervisor.load import body

numbers = itertools.count()


def with_identity(mm_hash: str) -> bytes:
    """A request with one image of that identity."""
    request = json.loads(body(1))
    for part in request["messages"][-1]["content"]:
        if part["type"] == "image_url":
            part["uuid"] = mm_hash
    return json.dumps(request).encode()


async def post(port: int, data: bytes) -> int:
    """The status of the answer; 0 when the server died of the request."""
    headers = {"content-type": "application/json"}
    try:
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"http://127.0.0.1:{port}/v1/chat/completions", data=data) as response,
        ):
            await response.read()
            return response.status
    except aiohttp.ClientError:
        return 0


async def push(site: Site, encoder: int) -> str:
    """An item that an encoder holds for the PD, and the PD has not asked for. Its identity."""
    mm_hash = f"peril-{next(numbers)}"
    assert await post(site.base + 3 + encoder, with_identity(mm_hash)) == 200
    log = site.paths.logs / "pd.log"
    await until(lambda: f"received metadata for mm_hash={mm_hash}" in log.read_text(), 20, "the announcement")
    return mm_hash


async def text(site: Site) -> int:
    """A request without images, straight to the PD: its step takes what encoders have announced."""
    return await post(site.base + 1, body(0))


def tree(pid: int | None) -> set[int]:
    """A process with its engine."""
    assert pid
    return identity.tree(pid)


async def kill_whole(site: Site, name: str) -> None:
    """An encoder with its engine, at once; it is gone when this returns."""
    pids = tree((await site.process(name)).pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(identity.start_ticks(pid) for pid in pids), 10, "its end")


async def test_with_a_flush_an_encoder_may_be_killed_and_without_the_pd_goes_too(shared: Site) -> None:
    site = shared
    pd, encoder = await site.process("pd"), await site.process("encoder-0")
    await push(site, 0)
    assert await text(site) == 200
    await kill_whole(site, "encoder-0")
    assert await text(site) == 200
    assert (await site.process("pd")).pid == pd.pid
    await site.see(lambda s: s.cluster.health == "ok" and _pid(s, "encoder-0") not in {None, encoder.pid})
    await site.see(_trusted)  # the proxy tries one that was away, and has the PD take a step then

    await push(site, 0)
    await kill_whole(site, "encoder-0")
    assert await text(site) != 200
    state = await site.see(lambda s: s.cluster.health == "ok" and _pid(s, "pd") not in {None, pd.pid})
    assert state.process("encoder-1") is not None


def _trusted(state: ClusterState) -> bool:
    return all(p.encoder is None or p.encoder.state == "ready" for p in state.processes)


def _pid(state: ClusterState, name: str) -> int | None:
    process = state.process(name)
    return process.pid if process else None


async def test_restart_with_an_item_staged_flushes_first(shared: Site) -> None:
    """Nobody will ask for the item: only the flush takes it out of the PD's queue."""
    site = shared
    pd, encoder = await site.process("pd"), await site.process("encoder-0")
    await push(site, 0)
    await site.client.restart("encoder-0")
    await site.see(lambda s: s.cluster.health == "ok" and _pid(s, "encoder-0") not in {None, encoder.pid})
    assert await text(site) == 200
    assert (await site.process("pd")).pid == pd.pid


async def test_an_encoder_that_hangs_in_a_pull_is_named(shared: Site) -> None:
    site = shared
    mm_hash = await push(site, 1)
    encoder = await site.process("encoder-1")
    engine = tree(encoder.pid) - {encoder.pid}
    for pid in engine:
        os.kill(pid, signal.SIGSTOP)
    asked = asyncio.create_task(post(site.base + 1, with_identity(mm_hash)))
    try:
        await site.see(
            lambda s: any(a.subject == "encoder-1" and "the PD is fetching" in a.text for a in s.alarms)
        )
        await site.see(
            lambda s: any(p.state is State.STALLED and "the PD has waited" in p.reason for p in s.processes)
        )
    finally:
        for pid in engine:
            os.kill(pid, signal.SIGCONT)
    assert await asked == 200
    state = await site.see(lambda s: s.cluster.health == "ok" and not s.alarms)
    assert _pid(state, "encoder-1") == encoder.pid


async def test_a_death_that_was_announced_and_does_not_come_is_looked_into(shared: Site) -> None:
    """The line stands in the log, the PD goes on: images are held off, and then not any more."""
    site = shared
    pd = await site.process("pd")
    fifo = next(site.paths.run.glob("pd@*/log.fifo"))
    with fifo.open("wb", buffering=0) as f:
        f.write(
            b"(EngineCore pid=1) [vllm-rbln] WARNING 11-29 19:15:04 [x.py:640] EC Nixl: timed out waiting "
            b"for mm_hash=nobodys (30.0s)\n"
        )
    await site.see(lambda s: any(a.subject == "pd" and a.severity == "critical" for a in s.alarms))
    with pytest.raises(ControlError) as refused:
        async for _ in site.client.prompt(body(1)):
            pass
    assert refused.value.status == 503
    state = await site.see(lambda s: s.cluster.health == "ok" and not s.alarms)
    assert _pid(state, "pd") == pd.pid
    assert any("lives on" in e.text for e in state.events)
    assert b'"choices"' in b"".join([part async for part in site.client.prompt(body(2))])


async def test_what_was_counted_is_known_to_the_next_daemon(shared: Site) -> None:
    site = shared
    _ = [part async for part in site.client.prompt(body(4), "before-the-new-daemon")]

    def told(state: ClusterState) -> bool:
        trace = next((t for t in state.traces if t.id == "before-the-new-daemon"), None)
        return trace is not None and sum(s.kind == "pull" for s in trace.spans) == 4

    await site.see(told)
    before = (await site.client.state()).cluster.transfer
    assert before is not None
    for _ in range(2):
        # However it ends, and whether or not it could remember the latest.
        os.kill(site.daemon_pid(), signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{site.daemon_pid()}").exists(), 10, "the daemon's end")
        await site.start()
        state = await site.see(
            lambda s: told(s) and s.cluster.transfer is not None and s.cluster.health == "ok"
        )
        assert state.cluster.transfer == before
        for name in ("encoder-0", "encoder-1"):
            process = state.process(name)
            assert process is not None
            assert process.state is State.READY
            assert process.transfer is not None


def intruder(port: int, tree: set[int]) -> ports.Holder | None:
    return ports.intruders({"x": (port, tree)})["x"]


async def test_a_twin_on_the_port_is_named(short_dir: Path) -> None:
    """As another vLLM would: it binds with SO_REUSEPORT, and takes half of the connections."""
    code = (
        "import socket,sys\ns = socket.socket()\ns.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "s.bind(('127.0.0.1', int(sys.argv[1])))\ns.listen()\n"
        "print(s.getsockname()[1], flush=True)\nsys.stdin.read()"
    )
    begin = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen([*begin, "0"], stdin=pipe, stdout=pipe) as ours:
        assert ours.stdout
        port = int(ours.stdout.readline())
        tree = identity.tree(ours.pid)
        assert intruder(port, tree) is None
        with subprocess.Popen([*begin, str(port)], stdin=pipe, stdout=pipe) as twin:
            assert twin.stdout
            twin.stdout.readline()
            found = intruder(port, tree)
            assert found is not None
            assert (found.port, found.pid) == (port, twin.pid)
            twin.communicate()
        assert intruder(port, tree) is None
        other = intruder(port, {1})
        assert other is not None
        assert other.pid == ours.pid
        ours.communicate()

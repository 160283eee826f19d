"""The daemon with real processes: order, restarts, crashes, orphans, strangers on ports, who may act."""

import asyncio
import os
import re
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eccon import shim
from eccon.client import ControlError, NotRunning
from eccon.model import ClusterState, State
from eccon.supervisor import DaemonError, start_daemon
from tests.supervisor.conftest import Site, until


def texts(state: ClusterState, subject: str, since: float = 0.0) -> list[str]:
    """What happened to one process."""
    return [e.text for e in state.events if e.subject == subject and e.at >= since]


def shim_of(site: Site, name: str) -> int:
    """Pid of the shim that keeps a process, as its life says."""
    newest = max(site.paths.run.glob(f"{name}@*"), key=lambda d: int(d.name.rpartition("@")[2]))
    return int(str(shim.read_whole(str(newest / "status.json"))["shim"]))


@pytest.fixture(scope="module")
def shared() -> Iterator[Site]:
    """For the tests that leave a cluster as they found it. The PD is slow to start; engines stand apart."""
    with tempfile.TemporaryDirectory(prefix="ecc", dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECCON_STATE_DIR", f"{name}/s")
        site = Site(Path(name))
        try:
            asyncio.run(_up(site))
            yield site
            asyncio.run(site.down())
        finally:
            site.sweep()


async def _up(site: Site) -> None:
    await site.up(FAKE="apart", FAKE_PD="slow=0.4", failures=50)


async def test_the_pd_first_then_encoders_and_nothing_is_left_at_the_end(site: Site) -> None:
    client = await site.up(FAKE_PD="slow=0.5")
    state = await client.state()
    assert [p.name for p in state.processes] == ["pd", "proxy", "encoder-0", "encoder-1"]
    state = await site.see(lambda s: s.cluster.health == "ok")
    pd_ready = next(e.at for e in state.events if e.subject == "pd" and "→ ready" in e.text)
    for name in ("encoder-0", "encoder-1"):
        assert "stopped → waiting: for the PD, which is" in texts(state, name)[0]
        process = state.process(name)
        assert process is not None
        assert process.started_at is not None
        assert process.started_at >= pd_ready
        (ready,) = [t for t in texts(state, name) if "ready" in t and "stopped →" not in t]
        assert re.fullmatch(r"\w+ → ready after \d+\.\d s", ready)
    await site.down()
    assert not site.paths.control_socket.exists()


async def test_restart_gives_another_pid_and_twenty_toggles_end_in_the_last_wish(shared: Site) -> None:
    site, client, begun = shared, shared.client, time.time()
    before = await site.process("encoder-0")
    await client.restart("encoder-0")
    await client.restart("encoder-0")
    state = await site.see(lambda s: _is(s, "encoder-0", State.READY, not_pid=before.pid))
    assert state.process("encoder-0").restarts == before.restarts + 1  # type: ignore[union-attr]
    assert sum("→ starting" in t for t in texts(state, "encoder-0", begun)) == 1
    for n in range(20):
        await (client.stop if n % 2 else client.start)("encoder-1")
    await site.see(lambda s: _is(s, "encoder-1", State.STOPPED))
    await asyncio.gather(*((client.start if n % 2 else client.stop)("encoder-1") for n in range(19)))
    await client.start("encoder-1")
    await site.settled()


async def test_one_that_does_not_answer_any_more_is_an_alarm(shared: Site) -> None:
    site = shared
    silent = await site.process("encoder-0")
    assert silent.pid
    os.kill(silent.pid, signal.SIGSTOP)
    try:
        state = await site.see(lambda s: any(a.subject == "encoder-0" for a in s.alarms))
        (alarm,) = state.alarms
        assert (alarm.severity, alarm.help) == ("critical", "restart")
        assert alarm.text.startswith("does not serve: /health did not answer")
    finally:
        os.kill(silent.pid, signal.SIGCONT)
    state = await site.see(lambda s: not s.alarms and _is(s, "encoder-0", State.READY))
    assert state.process("encoder-0").pid == silent.pid  # type: ignore[union-attr]


def _is(state: ClusterState, name: str, wanted: State, *, not_pid: int | None = None) -> bool:
    p = state.process(name)
    return p is not None and p.state is wanted and (not_pid is None or p.pid != not_pid)


async def test_a_killed_parent_s_children_are_ended_before_it_is_started_again(shared: Site) -> None:
    """The engine in its own session keeps the device; a second one beside it would fail."""
    site, client, begun = shared, shared.client, time.time()
    pd = await site.process("pd")
    before = await site.process("encoder-0")
    assert before.pid
    tree = set(site.left())
    os.kill(before.pid, signal.SIGKILL)
    state = await site.see(lambda s: _is(s, "encoder-0", State.READY, not_pid=before.pid))
    assert "killed by signal 9" in texts(state, "encoder-0", begun)
    process = state.process("encoder-0")
    assert process is not None
    assert process.exit is not None
    assert (process.exit.signal, process.exit.asked) == (9, False)
    fresh = set(site.left())
    assert len(fresh) == len(tree)
    assert (await site.process("pd")).pid == pd.pid
    begun = time.time()
    await client.stop("encoder-0")
    state = await site.see(lambda s: any("stopped" in t for t in texts(s, "encoder-0", begun)))
    assert [t for t in texts(state, "encoder-0", begun) if "stopped" in t] == ["stopping → stopped"]
    stopped = state.process("encoder-0")
    assert stopped is not None
    assert (stopped.state, stopped.pid, stopped.started_at) == (State.STOPPED, None, None)
    assert len(site.left()) == len(tree) - 3
    await client.start("encoder-0")
    await site.settled()


async def test_the_pd_s_death_leaves_the_encoders_alone_and_new_ones_wait_for_it(shared: Site) -> None:
    site, client = shared, shared.client
    before = await client.state()
    pd = await site.process("pd")
    assert pd.pid
    os.kill(pd.pid, signal.SIGKILL)
    await site.see(lambda s: s.cluster.health == "unavailable")
    # It stays away until the encoder has come to wait for it.
    await client.stop("pd")
    await client.restart("encoder-1")
    await site.see(lambda s: _is(s, "encoder-1", State.WAITING))
    await client.start("pd")
    after = await site.settled()
    assert after.process("encoder-0") is not None
    assert after.process("encoder-0").pid == before.process("encoder-0").pid  # type: ignore[union-attr]


async def test_stubborn_ones_are_killed_together_after_the_grace(site: Site) -> None:
    site.write(encoders=4, grace=3.0, FAKE="stubborn")
    client = await site.start()
    for name in ("pd", "encoder-0", "encoder-1", "encoder-2", "encoder-3"):
        await client.start(name)
    await site.see(lambda s: sum(p.state is State.READY for p in s.processes) == 5)
    begun = time.monotonic()
    await site.client.down()
    await site.see(lambda s: any("killing it in" in p.reason for p in s.processes))
    state = await site.see(lambda s: all(p.state is State.STOPPED for p in s.processes))
    assert time.monotonic() - begun < 5 * 3.0, "one after the other it would take that long"
    for name in ("pd", "encoder-0", "encoder-3"):
        process = state.process(name)
        assert process is not None
        assert process.exit is not None
        assert (process.exit.signal, process.exit.asked) == (9, True)


async def test_a_crash_loop_ends_as_failed_with_the_last_lines(site: Site) -> None:
    """A code, the code that means success elsewhere, and a signal: all the same when nobody asked."""
    vices = {"exit=1": "exited with code 1", "exit=0": "without being asked", "crash": "killed by signal 6"}
    client = None
    for vice, told in vices.items():
        begun = time.time()
        site.write(failures=3, FAKE_PD=vice)
        client = client or await site.start()
        await client.reload()
        await client.start("pd")
        state = await site.see(lambda s, begun=begun: _failed(s, begun))  # type: ignore[misc]
        pd = state.process("pd")
        assert pd is not None
        assert told in pd.reason
        assert "3 deaths in a row" in pd.reason
        assert any("vLLM API server version" in line for line in pd.last_lines)
        assert sum("→ starting" in t for t in texts(state, "pd", begun)) == 3
    assert client is not None
    await client.start("encoder-0")
    state = await site.see(lambda s: _is(s, "encoder-0", State.WAITING))
    assert state.process("encoder-0").reason == "for the PD, which is failed"  # type: ignore[union-attr]


def _failed(state: ClusterState, begun: float) -> bool:
    pd = state.process("pd")
    return pd is not None and pd.state is State.FAILED and pd.since >= begun


async def test_short_lives_that_were_ready_count_as_deaths_too(site: Site) -> None:
    site.write(failures=3, FAKE_ENCODER="short=0.6", encoders=1)
    client = await site.start()
    await client.start("pd")
    await client.start("encoder-0")
    state = await site.see(lambda s: _is(s, "encoder-0", State.FAILED))
    assert sum("→ ready" in t for t in texts(state, "encoder-0")) >= 1
    assert _is(state, "pd", State.READY)


async def test_up_with_a_taken_port_names_its_holder_and_starts_nothing(site: Site) -> None:
    site.write()
    client = await site.start()
    with socket.socket() as http, socket.socket() as pull:
        http.bind(("127.0.0.1", site.base + 4))
        http.listen()
        pull.bind(("0.0.0.0", site.base + 2))
        with pytest.raises(ControlError) as refused:
            await client.up()
        assert refused.value.status == 409
        assert f"encoder-1: port {site.base + 4} is held by pid {os.getpid()} (" in str(refused.value)
        assert f"pd: port {site.base + 2} is held by a process that cannot be named" in str(refused.value)
        state = await client.state()
        assert all(p.state is State.STOPPED for p in state.processes)
        await client.up(partial=True)
        state = await site.see(lambda s: _is(s, "pd", State.BLOCKED))
        assert "is held by" in state.process("pd").reason  # type: ignore[union-attr]
    await site.settled()


async def test_a_port_that_is_taken_later_blocks_one_process_and_is_taken_back(shared: Site) -> None:
    site, client = shared, shared.client
    await client.stop("encoder-1")
    await site.see(lambda s: _is(s, "encoder-1", State.STOPPED))
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", site.base + 4))
        stranger.listen()
        await client.start("encoder-1")
        state = await site.see(lambda s: s.cluster.health == "degraded")
        assert _is(state, "encoder-1", State.BLOCKED)
        assert f"pid {os.getpid()}" in state.process("encoder-1").reason  # type: ignore[union-attr]
    await site.settled()


async def test_another_server_s_answer_is_not_taken_for_ours(site: Site) -> None:
    site.write(FAKE_PD="stranger")
    client = await site.start()
    await client.start("pd")
    await client.start("encoder-0")
    state = await site.see(lambda s: "another server" in s.process("pd").reason)  # type: ignore[union-attr]
    assert not _is(state, "pd", State.READY)
    assert _is(state, "encoder-0", State.WAITING)


async def test_add_and_remove(shared: Site) -> None:
    site, client = shared, shared.client
    assert await client.add() == "encoder-2"
    state = await site.see(lambda s: _is(s, "encoder-2", State.READY))
    assert state.process("encoder-2").port == site.base + 5  # type: ignore[union-attr]
    await client.remove("encoder-0")
    state = await site.see(lambda s: s.process("encoder-0") is None)
    await site.see(lambda s: s.cluster.health == "ok")
    with pytest.raises(ControlError, match="no process is called 'encoder-0'"):
        await client.restart("encoder-0")
    assert await client.add() == "encoder-0"
    await site.settled()
    with pytest.raises(ControlError, match="only encoders"):
        await client.remove("pd")
    await client.remove("encoder-2")
    await site.see(lambda s: len(s.processes) == 4)


async def test_a_new_daemon_finds_everything_as_it_was(shared: Site) -> None:
    site, client, begun = shared, shared.client, time.time()
    await client.add()
    await site.see(lambda s: len(s.processes) == 5)
    before = await site.settled()
    os.kill(site.daemon_pid(), signal.SIGKILL)
    with pytest.raises(NotRunning):
        await client.state()
    # One dies while there is no daemon, one shim is killed: both are found out.
    lost = before.process("encoder-1")
    assert lost is not None
    assert lost.pid
    os.kill(lost.pid, signal.SIGKILL)
    shim_pid = shim_of(site, "encoder-0")
    os.kill(shim_pid, signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{shim_pid}").exists(), 20, "the shim's end")
    await site.start()
    after = await site.see(
        lambda s: s.cluster.health == "ok" and _is(s, "encoder-1", State.READY, not_pid=lost.pid)
    )
    for name in ("proxy", "pd", "encoder-0", "encoder-2"):
        old, new = before.process(name), after.process(name)
        assert old is not None
        assert new is not None
        assert (old.pid, old.restarts) == (new.pid, new.restarts), name
    assert any("a new one took over" in t for t in texts(after, "encoder-0", begun))
    assert any("killed by signal 9" in t for t in texts(after, "encoder-1", begun))
    assert any("ready after" in t for t in texts(after, "encoder-0")), "the history of the first daemon"
    assert after.seq > before.seq
    await client.remove("encoder-2")
    await site.see(lambda s: len(s.processes) == 4)


async def test_a_daemon_that_is_told_to_end_leaves_the_cluster_running(shared: Site) -> None:
    site, client = shared, shared.client
    pids = {p.name: p.pid for p in (await client.state()).processes}
    os.kill(site.daemon_pid(), signal.SIGTERM)
    await until(lambda: not site.paths.control_socket.exists(), 10, "the daemon's end")
    await site.start()
    state = await site.see(lambda s: s.cluster.health == "ok")
    assert {p.name: p.pid for p in state.processes} == pids


async def test_a_killed_shim_is_replaced_while_the_server_runs_on(shared: Site) -> None:
    site, begun = shared, time.time()
    before = await site.process("pd")
    os.kill(shim_of(site, "pd"), signal.SIGKILL)
    state = await site.see(lambda s: any("a new one took over" in t for t in texts(s, "pd", begun)))
    assert state.process("pd").pid == before.pid  # type: ignore[union-attr]
    assert _is(state, "pd", State.READY)
    assert before.pid
    os.kill(before.pid, signal.SIGKILL)
    state = await site.see(lambda s: _is(s, "pd", State.READY, not_pid=before.pid))
    assert any("exit status is unknown" in t for t in texts(state, "pd"))


async def test_there_is_one_daemon_and_only_this_user_reaches_it(site: Site) -> None:
    site.write()
    paths = await asyncio.gather(*(asyncio.to_thread(start_daemon, site.config) for _ in range(3)))
    assert len(set(paths)) == 1
    pid = site.daemon_pid()
    second = await asyncio.create_subprocess_exec(
        os.sys.executable,  # type: ignore[attr-defined]
        "-m",
        "eccon.supervisor",
        "--config",
        str(site.config),
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await second.communicate()
    assert second.returncode == 1
    assert f"runs already: pid {pid}" in err.decode()
    assert stat.S_IMODE(site.paths.control_socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(site.paths.root.stat().st_mode) == 0o700


async def test_a_stale_socket_and_an_old_lock_file_are_no_obstacle(site: Site) -> None:
    site.write()
    site.paths.lock.write_text("1\n")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(site.paths.control_socket))
    await site.start()
    assert (await site.client.state()).cluster.health == "stopped"


async def test_a_reload_applies_what_changed_and_a_bad_one_changes_nothing(shared: Site) -> None:
    site, client = shared, shared.client
    text = site.config.read_text()
    site.config.write_text(text.replace("count = 2", "count = 0"))
    with pytest.raises(ControlError, match=r"eccon.toml:\d+: encoders.count = 0"):
        await client.reload()
    await site.see(lambda s: s.cluster.health == "ok")
    site.config.write_text(text.replace("count = 2", "count = 3"))
    pids = {p.name: p.pid for p in (await client.state()).processes}
    await client.reload()
    state = await site.see(lambda s: _is(s, "encoder-2", State.READY))
    assert {n: state.process(n).pid for n in pids} == pids  # type: ignore[union-attr]
    site.config.write_text(text)
    await client.reload()
    await site.see(lambda s: len(s.processes) == 4)


async def test_a_daemon_that_cannot_start_says_why(site: Site) -> None:
    site.write()
    site.paths.control_socket.mkdir()
    with pytest.raises(DaemonError, match=r"control\.sock"):
        await site.start()


async def test_it_lingers_for_consoles_and_then_ends_everything(site: Site) -> None:
    site.write()
    await asyncio.to_thread(start_daemon, site.config, linger_s=1.5)
    await site.client.up()
    stream = site.client.changes(console=True)
    await anext(stream)
    await site.settled()
    await asyncio.sleep(1.7)
    await site.see(lambda s: s.cluster.health == "ok")
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: not site.left(), 20, "the end of everything")
    assert not site.paths.control_socket.exists()


async def test_logs_are_read_followed_and_searched(shared: Site) -> None:
    site, client = shared, shared.client
    lines = [line async for line in client.logs("pd", 50)]
    assert "Application startup complete." in lines
    seen: list[str] = []

    async def follow() -> None:
        async for line in client.logs("encoder-0", 1, follow=True):
            seen.append(line)
            if line.startswith("eccon: started pid") and len(seen) > 1:
                return

    task = asyncio.create_task(follow())
    await until(lambda: bool(seen), 5, "the first line")
    await client.restart("encoder-0")
    await asyncio.wait_for(task, 20)
    await site.settled()
    found = [line async for line in client.logs("pd", 5, grep="APPLICATION startup")]
    assert set(found) == {"Application startup complete."}
    with pytest.raises(ControlError, match="no process is called"):
        _ = [line async for line in client.logs("nobody")]
    assert [line async for line in client.logs("daemon", 5)]

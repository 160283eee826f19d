"""The daemon with the real proxy and the stand-in for vLLM: images flow while encoders come and go."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import aiohttp
import pytest
import trustme

from eccon import prompt
from eccon.client import ControlError
from eccon.model import ClusterState, Role, State
from eccon.supervisor import identity
from tests.supervisor.conftest import SIM, Site, serving, until
from tests.supervisor.load import Load, body


async def test_transfers_of_each_image_are_measured_and_join_its_trace(shared: Site) -> None:
    site = shared
    before = await site.client.state()
    requests = before.cluster.requests
    encoders = [p for p in before.processes if p.role is Role.ENCODER]
    items = [p.encoder.items if p.encoder else 0 for p in encoders]
    transfers = [p.transfer.total.count if p.transfer else 0 for p in encoders]
    answer = b"".join([part async for part in site.client.prompt(body(4), "my-request")])
    assert b'"choices"' in answer

    def measured(state: ClusterState) -> bool:
        trace = next((t for t in state.traces if t.id == "my-request"), None)
        return trace is not None and sum(s.kind == "pull" for s in trace.spans) == 4

    state = await site.see(measured)
    trace = next(t for t in state.traces if t.id == "my-request")
    for kind in ("push", "wait", "pull"):
        spans = [s for s in trace.spans if s.kind == kind]
        assert sorted(s.item for s in spans if s.item is not None) == [0, 1, 2, 3]
        assert {s.encoder for s in spans} == {"encoder-0", "encoder-1"}
        for s in spans:
            assert s.end is not None
            assert s.start <= s.end

    def counted(state: ClusterState) -> bool:
        """The counts come by another way than the trace, and at their own time."""
        encoders = [p for p in state.processes if p.role is Role.ENCODER]
        return (
            state.cluster.requests == requests + 1
            and [p.encoder.items if p.encoder else 0 for p in encoders] == [n + 2 for n in items]
            and [p.transfer.total.count if p.transfer else 0 for p in encoders] == [n + 2 for n in transfers]
        )

    state = await site.see(counted)
    assert state.cluster.transfer_source == "log"
    assert state.cluster.transfer is not None
    assert state.cluster.transfer.total.count == sum(transfers) + 4


async def test_an_encoder_is_restarted_removed_and_added_under_load_and_no_request_fails(
    shared: Site,
) -> None:
    site = shared
    load = Load(site)
    await load.some_more()
    pd = await site.process("pd")
    before = await site.process("encoder-0")
    await site.client.restart("encoder-0")
    await site.see(lambda s: s.process("encoder-0").pid not in {before.pid, None})  # type: ignore[union-attr]
    await site.see(lambda s: s.cluster.health == "ok")
    await load.some_more()
    assert await site.client.add() == "encoder-2"
    state = await site.see(
        lambda s: (p := s.process("encoder-2")) is not None and p.encoder is not None and p.encoder.items > 0
    )
    await site.client.remove("encoder-1")
    state = await site.see(lambda s: s.process("encoder-1") is None)
    await load.some_more()
    await load.end()
    assert (await site.process("pd")).pid == pd.pid
    assert not any("force" in e.text or "could not be flushed" in e.text for e in state.events)


async def test_a_stuck_encoder_is_seen_and_its_restart_frees_the_requests(shared: Site) -> None:
    site = shared
    for n in range(4):
        _ = [part async for part in site.client.prompt(body(2, first=2 * n))]
    stuck = await site.process("encoder-0")
    assert stuck.pid
    tree = [pid for pid in site.left() if os.getsid(pid) == os.getsid(stuck.pid)]
    for pid in tree:
        if pid != stuck.pid:
            # The engine hangs; the API server answers its health on.
            os.kill(pid, signal.SIGSTOP)
    load = Load(site)
    state = await site.see(lambda s: s.process("encoder-0").state is State.STALLED)  # type: ignore[union-attr]
    reason = state.process("encoder-0").reason  # type: ignore[union-attr]
    assert "in flight, none finished for" in reason or "the proxy sends it nothing" in reason
    alarm = next(a for a in state.alarms if a.subject == "encoder-0")
    assert (alarm.severity, alarm.help) == ("critical", "restart")
    pd = await site.process("pd")
    await site.client.restart("encoder-0")
    state = await site.see(
        lambda s: s.process("encoder-0").pid not in {stuck.pid, None} and s.cluster.health == "ok"  # type: ignore[union-attr]
    )
    assert not state.alarms
    await load.some_more()
    await load.end()
    assert (await site.process("pd")).pid == pd.pid


async def test_a_stuck_encoder_stays_stalled_over_trials_that_hang(site: Site) -> None:
    """Each trial that hangs is a new failure to the proxy; to an operator it is one long stall."""
    impatient = "[proxy.settings]\nencode_timeout = 3.0\neject_seconds = 0.2\neject_after = 1\n"
    site.write(launcher='kind = "sim"', more=impatient, **SIM)  # type: ignore[arg-type]
    await site.up()
    await site.see(lambda s: s.cluster.health == "ok")
    stuck = await site.process("encoder-0")
    assert stuck.pid
    engine = identity.tree(stuck.pid) - {stuck.pid}
    for pid in engine:
        os.kill(pid, signal.SIGSTOP)
    load = Load(site)
    await site.see(lambda s: s.process("encoder-0").state is State.STALLED)  # type: ignore[union-attr]
    tried: set[float] = set()
    seen: set[tuple[State, int]] = set()

    def tried_often(state: ClusterState) -> bool:
        process = state.process("encoder-0")
        assert process is not None
        seen.add((process.state, sum(a.subject == "encoder-0" for a in state.alarms)))
        if process.encoder:
            tried.add(process.encoder.since)
        return len(tried) >= 3

    await site.see(tried_often, 60)
    assert seen == {(State.STALLED, 1)}
    for pid in engine:
        os.kill(pid, signal.SIGCONT)
    state = await site.see(lambda s: s.process("encoder-0").state is State.READY and not s.alarms)  # type: ignore[union-attr]
    assert state.process("encoder-0").pid == stuck.pid  # type: ignore[union-attr]
    await load.some_more()
    await load.end()


async def test_policy_restarts_a_stuck_encoder_by_itself(shared: Site) -> None:
    site = shared
    text = site.config.read_text()
    site.config.write_text(text.replace("[supervisor]\n", "[supervisor]\nrestart_stalled_s = 0.5\n"))
    await site.client.reload()
    for n in range(4):
        _ = [part async for part in site.client.prompt(body(2, first=2 * n))]
    before = await site.client.state()
    stuck = before.process("encoder-1")
    assert stuck is not None
    assert stuck.pid
    for pid in identity.tree(stuck.pid) - {stuck.pid}:
        os.kill(pid, signal.SIGSTOP)
    load = Load(site)
    state = await site.see(
        lambda s: s.process("encoder-1").pid not in {None, stuck.pid} and s.cluster.health == "ok",  # type: ignore[union-attr]
        60,
    )
    await load.some_more()
    await load.end()
    assert state.process("pd").pid == before.process("pd").pid  # type: ignore[union-attr]
    site.config.write_text(text)
    await site.client.reload()


async def test_the_pd_is_restarted_with_images_held_off_meanwhile(shared: Site) -> None:
    site = shared
    before = await site.client.state()
    await site.client.restart("pd")
    await site.see(lambda s: s.process("pd").state is State.STOPPING)  # type: ignore[union-attr]
    with pytest.raises(ControlError) as refused:
        async for _ in site.client.prompt(body(1)):
            pass
    assert refused.value.status == 503
    state = await site.see(
        lambda s: s.cluster.health == "ok" and s.process("pd").pid != before.process("pd").pid  # type: ignore[union-attr]
    )
    for name in ("proxy", "encoder-0", "encoder-1"):
        assert state.process(name).pid == before.process(name).pid  # type: ignore[union-attr]
    answer = b"".join([part async for part in site.client.prompt(body(2))])
    assert b'"choices"' in answer


async def test_an_announced_death_is_told_at_once(site: Site) -> None:
    """An image that no encoder sent: the PD waits for it, says so, and dies."""
    await serving(site, ECCON_SIM_TIME_SCALE="0.03")
    pd = await site.process("pd")
    alarmed = asyncio.create_task(
        site.see(lambda s: any(a.subject == "pd" and a.severity == "critical" for a in s.alarms))
    )
    async with (
        aiohttp.ClientSession(headers={"content-type": "application/json"}) as session,
        session.post(f"http://127.0.0.1:{site.base + 1}/v1/chat/completions", data=body(1)) as response,
    ):
        assert response.status == 500
    state = await alarmed
    assert any("an image never arrived" in e.text for e in state.events)
    state = await site.see(
        lambda s: s.cluster.health == "ok" and s.process("pd").pid not in {pd.pid, None}  # type: ignore[union-attr]
    )
    assert not [a for a in state.alarms if a.subject == "pd"]


async def test_another_server_on_an_encoders_port_is_an_alarm_until_it_leaves(shared: Site) -> None:
    site = shared
    port = (await site.process("encoder-1")).port
    with socket.socket() as twin:
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        twin.bind(("127.0.0.1", port))
        twin.listen()
        # A new daemon looks at once.
        os.kill(site.daemon_pid(), signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{site.daemon_pid()}").exists(), 10, "the daemon's end")
        await site.start()
        state = await site.see(lambda s: any(a.key.startswith("twin:encoder-1@") for a in s.alarms))
        text = next(a.text for a in state.alarms if a.key.startswith("twin:"))
        assert text.startswith(f"pid {os.getpid()} (")
        assert text.endswith(f"listens on its port {port} too, and takes requests away")
    os.kill(site.daemon_pid(), signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{site.daemon_pid()}").exists(), 10, "the daemon's end")
    await site.start()
    await site.see(lambda s: s.cluster.health == "ok" and not s.alarms)


async def test_a_pd_that_waits_for_a_missing_image_is_an_alarm_with_the_time_of_its_death(site: Site) -> None:
    site.write(launcher='kind = "sim"', more="[proxy.settings]\nstall_after = 2.0\n", **SIM)  # type: ignore[arg-type]
    await site.up()
    await site.see(lambda s: s.cluster.health == "ok")
    text = prompt.build("m", "Hello?", [], stream=False, max_tokens=4)
    async with aiohttp.ClientSession(headers={"content-type": "application/json"}) as session:

        async def ask(port: int, data: bytes) -> None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", data=data) as answer:
                    await answer.read()

        async def keep_asking() -> None:
            while True:
                await ask(site.base, text)

        # Past the proxy: no encoder has seen its image. What comes through the proxy then stands still too.
        begun = time.time()
        asking = [asyncio.create_task(ask(site.base + 1, body(1))), asyncio.create_task(keep_asking())]

        def stalled(state: ClusterState) -> bool:
            process = state.process("pd")
            told = any(a.key == "stalled:pd" for a in state.alarms)
            return told and process is not None and process.state is State.STALLED

        state = await site.see(stalled)
        due = next(a.due for a in state.alarms if a.key == "stalled:pd")
        assert due is not None
        # Sooner than it is told would be a lie; how much later follows from when the silence was noticed.
        assert -1 < due - (begun + 30) < 6
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)


async def test_a_new_proxy_gets_its_members_again(shared: Site) -> None:
    site = shared
    await site.client.remove("encoder-0")
    await site.see(lambda s: s.process("encoder-0") is None)
    assert await site.client.add() == "encoder-0"
    assert await site.client.add() == "encoder-2"
    await site.client.remove("encoder-1")
    await site.see(lambda s: s.process("encoder-1") is None and s.cluster.health == "ok")
    proxy = await site.process("proxy")
    assert proxy.pid
    os.kill(proxy.pid, signal.SIGKILL)

    def members(state: ClusterState) -> set[str]:
        return {p.name for p in state.processes if p.encoder is not None and p.encoder.state == "ready"}

    await site.see(lambda s: s.process("proxy").pid not in {proxy.pid, None})  # type: ignore[union-attr]
    await site.see(lambda s: s.cluster.health == "ok" and members(s) == {"encoder-0", "encoder-2"})
    assert b'"choices"' in b"".join([part async for part in site.client.prompt(body(4))])


async def test_a_proxy_with_tls_is_served_and_told_of_where_it_is(site: Site) -> None:
    """Its certificate names the host that clients know, not the loopback that the daemon uses."""
    issued = trustme.CA().issue_cert("images.example")
    both = site.directory / "both.pem"
    issued.private_key_and_cert_chain_pem.write_to_path(both)
    site.write(
        launcher='kind = "sim"',
        more=f"[proxy.settings]\nssl_certfile = '{both}'\n",
        **SIM,  # type: ignore[arg-type]
    )
    await site.up()
    state = await site.see(lambda s: s.cluster.health == "ok")
    assert state.cluster.public_url == f"https://127.0.0.1:{site.base}"
    assert b'"choices"' in b"".join([part async for part in site.client.prompt(body(2))])

    before = await site.process("proxy")
    moved = site.base + 9
    text = site.config.read_text()
    site.config.write_text(text.replace(f"port = {site.base}\n", f"port = {moved}\n"))
    await site.client.reload()
    assert (await site.client.state()).cluster.public_url == f"https://127.0.0.1:{moved}"

    def renewed(state: ClusterState) -> bool:
        now = state.process("proxy")
        return now is not None and now.pid not in {before.pid, None} and state.cluster.health == "ok"

    await site.see(renewed)
    assert b'"choices"' in b"".join([part async for part in site.client.prompt(body(2))])


async def test_all_encoders_are_renewed_one_by_one_and_scaled_under_load(shared: Site) -> None:
    site = shared
    load = Load(site)
    before = {p.name: p.pid for p in (await site.client.state()).processes}
    begun = time.time()
    await site.client.roll()
    with pytest.raises(ControlError, match="going on already"):
        await site.client.roll()
    down_together = 0

    def done(state: ClusterState) -> bool:
        nonlocal down_together
        down_together = max(down_together, sum(p.state is not State.READY for p in state.processes))
        return any(e.text == "rolling restart done" and e.at > begun for e in state.events)

    state = await site.see(done)
    assert down_together == 1
    for name in ("encoder-0", "encoder-1"):
        assert state.process(name).pid != before[name]  # type: ignore[union-attr]
    assert state.process("pd").pid == before["pd"]  # type: ignore[union-attr]
    await site.client.scale(3)
    await site.see(lambda s: len(s.processes) == 5 and s.cluster.health == "ok")
    await site.client.scale(1)
    await site.see(lambda s: [p.name for p in s.processes] == ["pd", "proxy", "encoder-0"])
    await load.some_more()
    await load.end()

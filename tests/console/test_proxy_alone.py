"""The console on a proxy that runs alone: what its admin API says, drain and resume, what is not possible."""

import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from eccon.console.app import ConsoleApp
from eccon.console.proxysource import ProxySource
from eccon.console.proxyview import ProxyView
from eccon.console.source import Problem
from eccon.console.widgets.rows import Rows
from eccon.model import ClusterState, Role
from eccon_proxy.schema import EncoderInfo, PDInfo, ProxyState, Trace
from tests.console.terminal import Terminal
from tests.console.test_screens import press, screen_text, until
from tests.proxy.support import Cluster, body_of, image, start_cluster

ENCODER = EncoderInfo(id="encoder-0", url="http://127.0.0.1:1", state="ready", items=3)
PD = PDInfo(url="http://127.0.0.1:2", state="ready", epoch=1.0)


def proxy_state(**changes: object) -> ProxyState:
    values = {
        "version": "1",
        "started_at": 1.0,
        "draining": False,
        "encoders": (ENCODER,),
        "pds": (PD,),
        "requests": 7,
        "inflight": 0,
        "queued": 2,
    }
    return ProxyState(**(values | changes))  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="ec") as directory:
        cluster = await start_cluster(Path(directory), ())
        try:
            yield cluster
        finally:
            await cluster.end()


async def test_members_counts_traces_drain_and_prompt(upstream: Cluster) -> None:
    await upstream.proxy.chat(body_of(image("a")))
    source = ProxySource(upstream.proxy.admin_socket)
    await source.probe()
    app = ConsoleApp(Path("none"), source=lambda: source)
    async with app.run_test(size=(140, 40)) as pilot:
        await until(lambda: "2/2 encoders" in screen_text(app), 20)
        assert "proxy alone" in screen_text(app)
        roles = [p.role for p in app.state.processes]
        assert roles == [Role.PD, Role.PROXY, Role.ENCODER, Role.ENCODER]
        await until(lambda: app.state.cluster.requests == 1)
        await until(lambda: any(t.status == 200 and t.items == 1 for t in app.state.traces))
        rows = app.screen.query_one("#processes", Rows)
        rows.choose("encoder-1")
        await press(pilot, "d", "y")
        await until(lambda: _of(app.state, "encoder-1") in ("draining", "drained"))
        await press(pilot, "u")
        await until(lambda: _of(app.state, "encoder-1") == "ready")
        await press(pilot, "r", "y")
        await until(lambda: "starts and stops no processes" in "".join(t for t, _ in app.message))
        answer = b"".join([chunk async for chunk in source.prompt(body_of(image("b")), "req-alone")])
        assert answer
        await until(lambda: app.trace("req-alone") is not None)
        await press(pilot, "l")
        await until(lambda: "knows no logs" in screen_text(app))
        await press(pilot, "escape")
        upstream.proxy.process.kill()
        await until(lambda: app.lost.startswith("proxy lost: "))
        with pytest.raises(Problem):
            await source.do("drain", "encoder-1")
        with pytest.raises(Problem, match="no proxy"):
            await source.probe()
        upstream.lenient |= {"ledger", "traceback"}


def _of(state: ClusterState, name: str) -> str:
    process = state.process(name)
    return process.encoder.state if process is not None and process.encoder is not None else ""


async def test_attach_on_a_terminal(upstream: Cluster, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "eccon", "attach", "--proxy", f"unix:{upstream.proxy.admin_socket}"]
    env = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    terminal = Terminal(argv, env, 100, 30)
    try:
        terminal.until("2/2 encoders", 30)
        terminal.press("q")
        assert terminal.wait() == 0
        assert terminal.restored()
    finally:
        terminal.process.kill()
        terminal.process.wait(10)
        terminal.hang_up()


def test_what_is_wrong_with_members_is_said() -> None:
    view = ProxyView("p")
    view.take_state(proxy_state())
    state = view.state()
    assert (state.cluster.health, state.cluster.queued, state.alarms) == ("ok", 2, ())
    view.take_encoder(
        EncoderInfo(id="encoder-0", url=ENCODER.url, state="ejected", reason="timed out twice", since=5.0)
    )
    state = view.state()
    assert state.cluster.health == "degraded"
    assert [(a.subject, a.text) for a in state.alarms] == [("encoder-0", "timed out twice")]
    assert state.events[-1].text == "ready → ejected: timed out twice"
    view.take_pd(PDInfo(url=PD.url, state="down", reason="refused"))
    assert view.state().cluster.health == "unavailable"
    view.take_state(proxy_state(encoders=(), requests=1))
    assert [p.role for p in view.state().processes] == [Role.PD, Role.PROXY]
    view.take_trace(Trace(id="a", started_at=1.0, model="m", ttft_s=0.5))
    state = view.state()
    assert state.cluster.model == "m"
    assert state.cluster.ttft is not None
    assert state.cluster.ttft.p50 == 500.0
    assert state.seq > 4

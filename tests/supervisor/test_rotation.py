"""Encoders that an operator sets aside, processes that others start, and the bundle for a report."""

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator

import aiohttp
import pytest

from eccon.client import ControlError
from eccon.model import ClusterState, Role, State
from eccon.supervisor import identity
from tests.supervisor.conftest import SIM, Site, until
from tests.supervisor.load import Load, body


def in_proxy(state: ClusterState, name: str) -> str:
    """How the proxy calls an encoder."""
    process = state.process(name)
    return process.encoder.state if process and process.encoder else ""


async def test_an_encoder_that_is_set_aside_stays_so_until_it_is_resumed(shared: Site) -> None:
    site = shared
    load = Load(site)
    await load.some_more()
    before = await site.client.state()
    await site.client.drain("encoder-0")
    state = await site.see(lambda s: in_proxy(s, "encoder-0") == "drained")
    assert state.process("encoder-0").pid == before.process("encoder-0").pid  # type: ignore[union-attr]
    assert "kept aside" in state.process("encoder-0").reason  # type: ignore[union-attr]
    items = state.process("encoder-0").encoder.items  # type: ignore[union-attr]
    # Whatever begins anew: the proxy, the daemon, the encoder itself.
    proxy = await site.process("proxy")
    await load.end()
    assert proxy.pid
    os.kill(proxy.pid, signal.SIGKILL)
    await site.see(
        lambda s: s.process("proxy").pid not in {None, proxy.pid} and in_proxy(s, "encoder-0") == "drained"  # type: ignore[union-attr]
    )
    os.kill(site.daemon_pid(), signal.SIGKILL)
    await until(lambda: not os.path.exists(f"/proc/{site.daemon_pid()}"), 10, "the daemon's end")  # noqa: PTH110
    await site.start()
    await site.client.restart("encoder-0")
    await site.see(
        lambda s: (
            s.process("encoder-0").pid not in {None, before.process("encoder-0").pid}  # type: ignore[union-attr]
            and in_proxy(s, "encoder-0") == "drained"
        )
    )
    load = Load(site)
    await load.some_more()
    await load.end()
    state = await site.client.state()
    assert state.process("encoder-0").encoder.items == 0, items  # type: ignore[union-attr]
    await site.client.resume("encoder-0")
    state = await site.see(lambda s: s.cluster.health == "ok")
    assert state.process("encoder-0").reason == ""  # type: ignore[union-attr]
    with pytest.raises(ControlError, match="is no encoder"):
        await site.client.drain("pd")


async def test_a_rolling_restart_begins_with_what_does_not_serve(site: Site) -> None:
    """It costs nothing, and the next one goes only when it is back."""
    site.write(encoders=3, failures=2)
    good = site.config.read_text()
    broken = '[[encoders.override]]\nindex = 2\nenv = { FAKE_ENCODER = "exit=1" }\n'
    site.config.write_text(good + broken)
    client = await site.start()
    await client.up()
    await site.see(
        lambda s: (
            [p.state for p in s.processes if p.name != "proxy"]
            == [State.READY, State.READY, State.READY, State.FAILED]
        )
    )
    site.config.write_text(good)
    await client.reload()
    await site.see(lambda s: all(in_proxy(s, f"encoder-{n}") == "ready" for n in (0, 1)))
    begun = time.time()
    await client.roll()
    lowest = 3

    def done(state: ClusterState) -> bool:
        nonlocal lowest
        ready = sum(p.role is Role.ENCODER and p.state is State.READY for p in state.processes)
        lowest = min(lowest, ready)
        return any(e.text == "rolling restart done" and e.at > begun for e in state.events)

    state = await site.see(done, 60)
    asked = [e.subject for e in state.events if e.text == "restart asked for" and e.at > begun]
    assert asked == ["encoder-2", "encoder-0", "encoder-1"]
    assert lowest >= 2
    assert state.cluster.health == "ok"


async def test_a_bundle_tells_all_but_the_secrets(shared: Site) -> None:
    site = shared
    _ = [part async for part in site.client.prompt(body(1), "in-the-bundle")]
    data = b"".join([part async for part in site.client.diagnostics()])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = {m.name.removeprefix("eccon-diagnostics/") for m in tar}
        state = tar.extractfile("eccon-diagnostics/now.json")
        assert state is not None
        assert b"in-the-bundle" in state.read()
    assert {"host.txt", "eccon.toml", "logs/pd.log", "logs/encoder-0.log", "daemon.log"} <= names
    assert any(n.startswith("run/pd@") for n in names)


async def run(site: Site, *argv: str, lines: int | None = None) -> tuple[int | None, str]:
    """`eccon …`: exit code and stdout; with `lines` it is interrupted when it has said that many."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "eccon", "-f", str(site.config), *argv),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    said = b""
    if lines is not None:
        for _ in range(lines):
            said += await asyncio.wait_for(process.stdout.readline(), 60)
        process.send_signal(signal.SIGINT)
    rest, complaint = await asyncio.wait_for(process.communicate(), 120)
    text = (said + rest).decode()
    assert "Traceback" not in complaint.decode(), complaint.decode()
    return process.returncode, text


async def test_each_has_its_command(shared: Site) -> None:
    site = shared
    assert await run(site, "drain", "encoder-1") == (0, "")
    assert in_proxy(await site.client.state(), "encoder-1") == "drained"
    code, text = await run(site, "status", "--watch", lines=5)
    assert code == 130
    assert "encoder-1" in text
    assert "\x1b" not in text
    code, text = await run(site, "status", "--watch", "--json", lines=1)
    assert code == 130
    assert json.loads(text.splitlines()[0])["processes"][0]["name"] == "pd"
    assert await run(site, "resume", "encoder-1") == (0, "")
    target = site.directory / "report.tar.gz"
    code, text = await run(site, "diagnostics", str(target))
    assert (code, text.startswith(str(target))) == (0, True)
    assert target.stat().st_mode & 0o777 == 0o600
    assert (await run(site, "diagnostics", "/no/such/place.gz"))[0] == 1
    assert (await run(site, "drain", "nobody"))[0] == 1
    before = {p.name: p.pid for p in (await site.client.state()).processes}
    assert (await run(site, "roll"))[0] == 0
    after = {p.name: p.pid for p in (await site.client.state()).processes}
    assert {n for n in after if after[n] != before[n]} == {"encoder-0", "encoder-1"}


async def test_the_api_describes_itself(shared: Site) -> None:
    connector = aiohttp.UnixConnector(str(shared.paths.control_socket))
    async with (
        aiohttp.ClientSession("http://eccon", connector=connector) as session,
        session.get("/schema/openapi.json") as response,
    ):
        paths = json.loads(await response.read())["paths"]
    for path in ("state", "events", "prompt", "up", "encoders", "logs/{name}", "traces/{trace_id}"):
        assert f"/v1/{path}" in paths


async def test_secrets_do_not_get_into_a_bundle_nor_on_the_screen(site: Site) -> None:
    site.write(
        more='\n[proxy.env]\nMY_API_KEY = "k3y-of-the-proxy"\n',
        VLLM_API_KEY="s3cret-of-all",
        FAKE_PD="slow=0",
    )
    text = site.config.read_text()
    site.config.write_text(text.replace("[pd]\n", '[pd]\nargs = ["--hf-token", "t0ken-of-pd"]\n'))
    await site.start()
    await site.client.start("pd")
    await site.see(lambda s: s.process("pd").state is State.READY)  # type: ignore[union-attr]
    (site.paths.logs / "pd.log").write_text("it said s3cret-of-all, and t0ken-of-pd\n")
    data = b"".join([part async for part in site.client.diagnostics()])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        whole = b"".join(f.read() for m in tar if (f := tar.extractfile(m)))
    assert b"it said ***, and ***" in whole
    for secret in (b"s3cret-of-all", b"t0ken-of-pd", b"k3y-of-the-proxy"):
        assert secret not in whole
    pd = await site.process("pd")
    assert dict(pd.env)["VLLM_API_KEY"] == "***"
    assert "t0ken-of-pd" not in pd.argv


@contextlib.contextmanager
def outside(site: Site, port: int, role: str, **connector: object) -> Iterator[subprocess.Popen[bytes]]:
    """A stand-in that this test starts and ends, not the daemon."""
    transfer = {
        "ec_connector": "RblnECNixlConnector",
        "ec_role": role,
        "ec_connector_extra_config": connector,
    }
    argv = [sys.executable, "-m", "eccon.sim", "serve", "m", "--port", str(port), "--host", "127.0.0.1"]
    argv += ["--mm-processor-kwargs", '{"max_pixels": 802816}', "--ec-transfer-config", json.dumps(transfer)]
    null = subprocess.DEVNULL
    with subprocess.Popen(
        argv, cwd=site.directory, env=os.environ | SIM, stdout=null, stderr=null, start_new_session=True
    ) as server:
        try:
            yield server
        finally:
            # Its engine too, should only its parent have been killed.
            for pid in identity.tree(server.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


async def test_an_external_pd_is_waited_for_served_and_never_touched(site: Site) -> None:
    """It is started, and started anew, by the test."""
    site.write(launcher='kind = "sim"', failures=20, **SIM)  # type: ignore[arg-type]
    theirs = site.base + 10
    url = f"http://127.0.0.1:{theirs}"
    site.config.write_text(
        site.config.read_text().replace("[pd]\n", f'[pd]\nexternal = true\nurl = "{url}"\n')
    )
    client = await site.start()
    await client.up()
    state = await site.see(lambda s: s.process("proxy").state is State.READY)  # type: ignore[union-attr]
    states = {p.name: (p.state, p.external, p.pid is None) for p in state.processes if p.name != "proxy"}
    assert states == {
        "pd": (State.WAITING, True, True),
        "encoder-0": (State.WAITING, False, True),
        "encoder-1": (State.WAITING, False, True),
    }
    assert f"{url}: nothing listens yet" in (await site.process("pd")).reason
    pull = {"pull_host": "127.0.0.1", "pull_port": site.base + 2}
    with outside(site, theirs, "ec_consumer", **pull) as first:
        await site.see(lambda s: s.cluster.health == "ok", 60)
        assert b'"choices"' in b"".join([part async for part in client.prompt(body(4))])
        for refused in (client.stop, client.restart, client.start):
            with pytest.raises(ControlError, match="pd is external: it was not started here"):
                await refused("pd")
        with pytest.raises(ControlError, match="external: its log is where it was started"):
            _ = [line async for line in client.logs("pd", 5)]
        # An encoder is restarted as with a PD of ours: drained, and flushed at theirs.
        await client.restart("encoder-0")
        before = await site.process("encoder-0")
        await site.see(lambda s: s.process("encoder-0").pid not in {before.pid, None})  # type: ignore[union-attr]
        state = await site.see(lambda s: s.cluster.health == "ok", 60)
        assert not any("could not be flushed" in e.text for e in state.events)
        assert first.poll() is None
    encoders = [p.pid for p in state.processes if p.role is Role.ENCODER]
    with outside(site, theirs, "ec_consumer", **pull) as second:
        await site.see(
            lambda s: s.cluster.health == "ok" and any("was restarted by" in e.text for e in s.events), 60
        )
        state = await client.state()
        assert [p.pid for p in state.processes if p.role is Role.ENCODER] == encoders
        assert b'"choices"' in b"".join([part async for part in client.prompt(body(4))])
        await client.down()
        await site.see(lambda s: s.cluster.health == "stopped")
        assert second.poll() is None


async def test_an_external_encoder_is_routed_to_and_never_touched(site: Site) -> None:
    """It is started by the test: a stand-in of its own that pushes to the cluster's PD."""
    site.write(launcher='kind = "sim"', failures=20, **SIM)  # type: ignore[arg-type]
    theirs = site.base + 10
    site.config.write_text(
        site.config.read_text()
        .replace("[supervisor]\n", "[supervisor]\nrestart_stalled_s = 0.1\n")
        .replace(
            "[proxy]\n",
            "[[encoders.override]]\nindex = 1\nexternal = true\n"
            f'url = "http://127.0.0.1:{theirs}"\n[proxy]\n',
        )
    )
    client = await site.start()
    await client.up()
    state = await site.see(lambda s: s.cluster.health == "degraded")
    encoder = state.process("encoder-1")
    assert encoder is not None
    assert (encoder.state, encoder.external, encoder.pid) == (State.WAITING, True, None)
    assert f"http://127.0.0.1:{theirs}: nothing listens yet" in encoder.reason
    with outside(site, theirs, "ec_producer", llm_host="127.0.0.1", llm_pull_port=site.base + 2) as server:
        await site.see(lambda s: s.cluster.health == "ok")
        assert b'"choices"' in b"".join([part async for part in client.prompt(body(4))])
        state = await site.see(
            lambda s: (
                (p := s.process("encoder-1")) is not None and p.encoder is not None and p.encoder.items == 2
            )
        )
        for refused in (client.stop, client.restart, client.start, client.remove):
            with pytest.raises(ControlError, match="encoder-1 is external"):
                await refused("encoder-1")
        # It hangs: that is seen, and nothing is done to it.
        daemon = site.daemon_pid()
        for n in range(4):
            _ = [part async for part in client.prompt(body(2, first=2 * n))]
        engine = identity.tree(server.pid) - {server.pid}
        for pid in engine:
            os.kill(pid, signal.SIGSTOP)
        load = Load(site)
        await site.see(lambda s: s.process("encoder-1").state is State.STALLED, 60)  # type: ignore[union-attr]
        for pid in engine:
            os.kill(pid, signal.SIGCONT)
        await site.see(lambda s: s.cluster.health == "ok", 60)
        await load.some_more()
        await load.end()
        assert site.daemon_pid() == daemon
        await client.drain("encoder-1")
        await site.see(lambda s: in_proxy(s, "encoder-1") == "drained")
        await client.resume("encoder-1")
        await site.see(lambda s: s.cluster.health == "ok")
        await client.down()
        await site.see(lambda s: s.cluster.health == "stopped")
        assert server.poll() is None
        assert (await site.process("encoder-1")).state is State.READY
        await client.up()
        await site.see(lambda s: s.cluster.health == "ok")
        server.terminate()
        await site.see(lambda s: s.process("encoder-1").state is State.WAITING)  # type: ignore[union-attr]

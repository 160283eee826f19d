"""The daemon with a fake `rbln-smi`: who may start, what is shown, and when a process counts as stopped."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from eccon.client import ControlError
from eccon.model import ClusterState, State
from tests.supervisor.conftest import Site, sleeper

TOOL = f"""#!{sys.executable}
import os
import signal
print(open(os.environ["FAKE_SMI"]).read())
"""


class Host:
    """What the fake tool says: ten devices in two groups, each with its own index."""

    def __init__(self, directory: Path) -> None:
        (directory / "bin").mkdir()
        self.tool = directory / "bin" / "rbln-smi"
        self.tool.write_text(TOOL)
        self.tool.chmod(0o755)
        self.said = directory / "smi.json"
        self.devices: list[dict[str, Any]] = [
            {"npu": n, "name": "RBLN-CA22", "device": f"rbln{n}", "status": "normal", "pstate": "P14",
             "group_id": str(n // 5), "sid": f"s{n}", "util": "0.0", "temperature": "30C",
             "card_power": "18109794uW", "memory": {"used": "75497472", "total": "16877879296"}}
            for n in range(10)
        ]  # fmt: skip
        self.contexts: list[dict[str, Any]] = []
        self.say()

    def say(self) -> None:
        """From now on."""
        fresh = self.said.with_suffix(".new")
        fresh.write_text(json.dumps({"devices": self.devices, "contexts": self.contexts}))
        fresh.replace(self.said)

    def use(self, pid: int, *devices: int) -> None:
        """A process has contexts there."""
        self.contexts += [
            {"npu": n, "pid": str(pid), "process": "VLLM::EngineCore", "memalloc": "3.5GiB", "status": "run"}
            for n in devices
        ]
        self.say()


@pytest.fixture
def host(site: Site, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Ahead of any real tool."""
    here = Host(site.directory)
    monkeypatch.setenv("PATH", f"{here.tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SMI", str(here.said))
    return here


def configure(site: Site, *, pd: str = "[0, 1]", encoders: str = "[5, 6, 7]") -> None:
    """A cluster on devices."""
    site.write(encoders=2)
    text = site.config.read_text().replace('kind = "none"', 'kind = "rbln"')
    text = text.replace("[pd]\n", f"[pd]\ndevices = {pd}\n")
    site.config.write_text(text.replace("[encoders]\n", f"[encoders]\ndevices = {encoders}\n"))


def state_of(state: ClusterState, name: str) -> State | None:
    process = state.process(name)
    return process.state if process else None


async def test_figures_alarms_and_an_end_that_waits_for_the_device(site: Site, host: Host) -> None:
    configure(site)
    client = await site.start()
    await client.up()
    state = await site.settled()
    encoder = state.process("encoder-0")
    assert encoder is not None
    assert encoder.pid
    assert (encoder.device, state.process("pd").device) == ("5", "0-1")  # type: ignore[union-attr]
    host.use(encoder.pid, 5)
    host.devices[5] |= {"util": "61.5", "pstate": "P10"}
    host.say()

    def shown(state: ClusterState) -> bool:
        process = state.process("encoder-0")
        return bool(process and process.npus and process.npus[0].contexts) and bool(state.alarms)

    state = await site.see(shown)
    npu = state.process("encoder-0").npus[0]  # type: ignore[union-attr]
    assert (npu.device, npu.util_percent, npu.contexts[0].pid) == ("rbln5", 61.5, encoder.pid)
    assert [n.device for n in state.process("pd").npus] == ["rbln0", "rbln1"]  # type: ignore[union-attr]
    assert "rbln7" in [n.device for n in state.cluster.spare_npus]
    assert state.cluster.npu_source == "rbln-smi"
    alarm = state.alarms[0]
    assert (alarm.subject, alarm.severity, alarm.help) == ("encoder-0", "warning", "drain")
    assert "throttled by heat" in alarm.text

    await client.stop("encoder-0")
    state = await site.see(
        lambda s: any(f"rbln5 has a context of pid {encoder.pid} yet" in p.reason for p in s.processes)
    )
    assert state_of(state, "encoder-0") is State.STOPPING
    assert not Path(f"/proc/{encoder.pid}").exists()
    host.contexts.clear()
    host.devices[5] |= {"pstate": "P14"}
    host.say()
    await site.see(lambda s: state_of(s, "encoder-0") is State.STOPPED and not s.alarms)


async def test_up_with_a_held_device_names_its_holder_and_starts_nothing(site: Site, host: Host) -> None:
    configure(site, pd="[4, 5]", encoders="[6, 7, 3]")
    client = await site.start()
    with sleeper() as stranger:
        host.use(stranger, 6)
        with pytest.raises(ControlError) as refused:
            await client.up()
        assert refused.value.status == 409
        assert f"encoder-0: device 6 is held by pid {stranger} (VLLM::EngineCore)" in str(refused.value)
        assert "pd: devices 4, 5 are of groups 0 and 1" in str(refused.value)
        assert all(p.state is State.STOPPED for p in (await client.state()).processes)
        for n in (4, 5):
            host.devices[n]["group_id"] = "0"
        host.say()
        await client.up(partial=True)
        state = await site.see(
            lambda s: state_of(s, "encoder-0") is State.BLOCKED and state_of(s, "encoder-1") is State.READY
        )
        assert f"pid {stranger}" in state.process("encoder-0").reason  # type: ignore[union-attr]
        # The spare is used by somebody else too, and a device of the host that nobody has is taken.
        host.use(stranger, 3)
        assert await client.add() == "encoder-2"
        state = await site.see(lambda s: state_of(s, "encoder-2") is State.READY)
        assert state.process("encoder-2").device == "0"  # type: ignore[union-attr]
        host.contexts.clear()
        host.say()
    await site.settled()


async def test_a_device_that_is_taken_while_its_process_is_down_blocks_the_restart(
    site: Site, host: Host
) -> None:
    configure(site)
    client = await site.start()
    await client.up()
    await site.settled()
    encoder = await site.process("encoder-0")
    assert encoder.pid
    with sleeper() as stranger:
        host.use(stranger, 5)
        os.kill(encoder.pid, signal.SIGKILL)
        state = await site.see(lambda s: state_of(s, "encoder-0") is State.BLOCKED)
        reason = state.process("encoder-0").reason  # type: ignore[union-attr]
        assert reason == f"device 5 is held by pid {stranger} (VLLM::EngineCore)"
        # The others go on, and an operator's restart changes nothing while the stranger is there.
        assert state_of(state, "encoder-1") is State.READY
        await client.restart("encoder-0")
        state = await site.see(lambda s: s.cluster.health == "degraded")
        assert state_of(state, "encoder-0") is State.BLOCKED
        assert Path(f"/proc/{stranger}").exists()
        host.contexts.clear()
        host.say()
        await site.see(lambda s: state_of(s, "encoder-0") is State.READY)


async def test_without_the_tool_it_is_said_and_all_works(
    site: Site, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"].replace(f"{host.tool.parent}:", ""))
    configure(site)
    client = await site.start()
    await client.up()
    state = await site.see(lambda s: s.cluster.npu_note != "" and state_of(s, "encoder-1") is State.READY)
    assert "rbln-smi is not installed" in state.cluster.npu_note
    assert state.process("encoder-1").npus == ()  # type: ignore[union-attr]
    await client.stop("encoder-1")
    await site.see(lambda s: state_of(s, "encoder-1") is State.STOPPED)

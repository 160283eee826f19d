"""Accelerators as the vendors' tools tell of them."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eccon.signals.devices import Reading, ToolError, numbers, rbln, reader
from eccon.signals.devices.reading import used_by
from eccon.signals.devices.tool import output_of
from tests.supervisor.conftest import sleeper

RECORDED = (Path(__file__).parent / "recorded" / "rbln-smi-8xCA22.json").read_bytes()
"""Eight RBLN-CA22 in two groups, KMD 3.0.0; `npu` repeats and the order is arbitrary."""


def changed(change: Callable[[dict[str, Any]], object]) -> Reading:
    """The recording, with a change."""
    said = json.loads(RECORDED)
    change(said)
    return rbln.parse(json.dumps(said).encode())


def test_devices_are_known_by_their_nodes_and_units_are_read() -> None:
    reading = rbln.parse(RECORDED)
    assert sorted(reading.devices) == list(range(8))
    first = reading.devices[0]
    assert (first.device, first.name, first.status, first.pstate) == ("rbln0", "RBLN-CA22", "normal", "P0")
    assert (first.util_percent, first.temperature_c, first.power_w) == (61.5, 29.0, 18.1)
    assert (first.memory_used, first.memory_total) == (3833593856, 16877879296)
    assert [reading.devices[n].group for n in range(8)] == ["0"] * 4 + ["1"] * 4
    assert [c.of.memory_bytes for c in reading.contexts] == [7 * 2**29, 2**29]
    assert {c.of.pid for c in reading.contexts} == {2733390}


def test_contexts_join_a_process_by_its_pids() -> None:
    reading = rbln.parse(RECORDED)
    npus = reading.of([0, 1], [2733390, 5])
    assert [n.device for n in npus] == ["rbln0", "rbln1"]
    assert all(c.pid == 2733390 for n in npus for c in n.contexts)
    assert all(n.contexts == () for n in reading.of([0, 1], [5]))
    assert reading.of([17], [5]) == ()


def test_where_an_index_repeats_the_process_tells_its_device() -> None:
    assert all(c.devices == frozenset() for c in rbln.parse(RECORDED).contexts)
    with sleeper(RBLN_VISIBLE_DEVICES="4-5") as user:
        deadline = time.monotonic() + 10
        while not used_by(user) and time.monotonic() < deadline:
            time.sleep(0.01)

        def by_user(said: dict[str, Any]) -> None:
            for context in said["contexts"]:
                context["pid"] = str(user)

        reading = changed(by_user)
    assert [sorted(c.devices) for c in reading.contexts] == [[4], [5]]
    assert reading.troubles([4]) == [f"device 4 is held by pid {user} (VLLM::EngineCore)"]
    assert reading.troubles([0, 1, 2, 3]) == []

    def once(said: dict[str, Any]) -> None:
        said["devices"] = [d for d in said["devices"] if d["group_id"] == "0"]

    assert [sorted(c.devices) for c in changed(once).contexts] == [[0], [1]]


def test_a_process_needs_devices_that_are_there_and_of_one_group() -> None:
    reading = rbln.parse(RECORDED)
    assert reading.troubles(range(4)) == []
    assert "of groups 0 and 1" in reading.troubles([3, 4])[0]
    assert "device 40 is not there: rbln-smi lists 0, 1, 2" in reading.troubles([40])[0]


@pytest.mark.parametrize(
    ("change", "about", "said"),
    [
        ({"pstate": "P10"}, "hot", "rbln3 is throttled by heat (32 °C)"),
        ({"pstate": "P12"}, "hangs", "rbln3 hangs (P12)"),
        ({"status": "error"}, "status", "rbln3 is error"),
    ],
)
def test_alarms(change: dict[str, str], about: str, said: str) -> None:
    reading = changed(lambda all_of_it: all_of_it["devices"][0].update(change))
    assert reading.alarms(reading.devices[3]) == {about: said}
    assert reading.alarms(reading.devices[0]) == {}


@pytest.mark.parametrize(
    "row",
    [
        {"device": "rbln9"},
        {"device": "rbln9", "memory": None, "util": None, "temperature": "N/A", "card_power": "-", "sid": 4},
        {"device": "rbln9", "memory": {"used": "1.5GiB"}, "temperature": 31, "card_power": "20W"},
        {"npu": 9},
    ],
)
def test_what_another_version_leaves_out_or_writes_otherwise(row: dict[str, Any]) -> None:
    reading = rbln.parse(json.dumps({"devices": [row, 5, {}], "contexts": [7, {"pid": "x"}]}).encode())
    assert list(reading.devices) == [9]
    assert reading.devices[9].device == "rbln9"
    assert reading.contexts == ()


@pytest.mark.parametrize("said", [b"", b"| NPU | Name |", b"[]", b'{"devices": 3}', b"\xff"])
def test_what_is_not_the_tool_s_json_is_said(said: bytes) -> None:
    with pytest.raises(ToolError, match="rbln-smi"):
        rbln.parse(said)


def tool(directory: Path, name: str, code: str) -> None:
    """A fake tool, first in the search path."""
    path = directory / name
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(0o755)


def test_the_older_tool_is_used_where_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    read = reader("rbln")
    assert read is not None
    with pytest.raises(ToolError, match="not installed") as missing:
        read()
    assert missing.value.missing
    tool(
        tmp_path,
        "rbln-stat",
        f"import sys; assert sys.argv[1:] == ['--json']; print('''{RECORDED.decode()}''')",
    )
    assert read().tool == "rbln-stat"
    # One that does not know -g.
    tool(
        tmp_path,
        "rbln-smi",
        f"import sys; '-g' in sys.argv and sys.exit(2); print('''{RECORDED.decode()}''')",
    )
    assert len(read().devices) == 8
    assert read().tool == "rbln-smi"
    assert reader("none") is None


def test_a_tool_that_hangs_is_given_up(tmp_path: Path) -> None:
    tool(tmp_path, "hangs", "import time; print('{', flush=True); time.sleep(1000)")
    begun = time.monotonic()
    with pytest.raises(ToolError, match="did not end within"):
        output_of((str(tmp_path / "hangs"),), 0.5)
    assert time.monotonic() - begun < 10
    tool(tmp_path, "talks", "import time\nwhile True: print('x' * 10000)")
    with pytest.raises(ToolError, match="did not end"):
        output_of((str(tmp_path / "talks"),), 60)
    with pytest.raises(ToolError, match="cannot be run"):
        output_of((str(tmp_path / "absent"),), 1)


class NVMLError(Exception):
    """As in the library."""


def test_gpus_by_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        msg = "Not Supported"
        raise NVMLError(msg)

    library = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda n: n,
        nvmlDeviceGetName=lambda _: b"A GPU",
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=5, total=10),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=7),
        nvmlDeviceGetTemperature=lambda _h, _k: 40,
        nvmlDeviceGetPowerUsage=refuse,
        nvmlDeviceGetPerformanceState=lambda _: 12,
        nvmlDeviceGetComputeRunningProcesses=lambda n: (
            [SimpleNamespace(pid=77, usedGpuMemory=None)] if n else []
        ),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    read = reader("cuda")
    assert read is not None
    reading = read()
    gpu = reading.devices[1]
    assert (gpu.device, gpu.name, gpu.util_percent, gpu.power_w) == ("cuda1", "A GPU", 7.0, None)
    assert reading.alarms(gpu) == {}, "P12 means idle there"
    assert reading.holders(1)[0].pid == 77
    assert reading.troubles([1]) == [], "a GPU may serve several"
    library.nvmlInit = refuse
    with pytest.raises(ToolError, match="Not Supported"):
        read()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ToolError, match="nvidia-ml-py"):
        read()


def test_numbers_of_devices() -> None:
    assert numbers("0-3,8") == (0, 1, 2, 3, 8)
    assert numbers("") == ()
    assert numbers("x, 5") == (5,)

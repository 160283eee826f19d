"""NVIDIA GPUs by their management library, for clusters with `devices.kind = "cuda"`. Needs nvidia-ml-py."""

import importlib
from typing import Any

from eccon.model import Npu, NpuContext
from eccon.signals.devices.reading import Context, Reading, ToolError

__all__ = ["read"]


def read() -> Reading:
    """One look.

    Raises:
        ToolError: the library is not installed, or finds no driver.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as e:
        msg = "nvidia-ml-py is not installed: no device figures"
        raise ToolError(msg, missing=True) from e
    try:
        nvml.nvmlInit()
        try:
            return _look(nvml)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as e:
        msg = f"NVML: {e}"
        raise ToolError(msg) from e


def _look(nvml: Any) -> Reading:
    devices, contexts = {}, []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)

        def ask(name: str, *more: Any, handle: Any = handle) -> Any:
            """None where the device does not tell."""
            try:
                return getattr(nvml, name)(handle, *more)
            except nvml.NVMLError:
                return None

        memory, use = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
        power, pstate = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetPerformanceState")
        heat = ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
        name = ask("nvmlDeviceGetName") or ""
        devices[index] = Npu(
            device=f"cuda{index}",
            index=index,
            name=name.decode() if isinstance(name, bytes) else str(name),
            status="normal",
            util_percent=None if use is None else float(use.gpu),
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            temperature_c=None if heat is None else float(heat),
            power_w=None if power is None else round(power / 1000, 1),
            pstate="" if pstate is None else f"P{pstate}",
            card=f"cuda{index}",
        )
        for process in ask("nvmlDeviceGetComputeRunningProcesses") or ():
            used = process.usedGpuMemory
            contexts.append(
                Context(
                    of=NpuContext(pid=int(process.pid), memory_bytes=None if used is None else int(used)),
                    devices=frozenset({index}),
                )
            )
    return Reading(kind="cuda", tool="NVML", devices=devices, contexts=tuple(contexts))

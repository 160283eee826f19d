"""NPUs and GPUs: there, free, of one group, and well."""

from collections.abc import Iterator

from eccon.doctor.evidence import Evidence
from eccon.doctor.finding import Finding, bad, good, note, warn
from eccon.launch.spec import devices_shown
from eccon.signals.devices import numbers

__all__ = ["free_and_grouped", "present", "tool_and_driver", "well"]


def _wanted(e: Evidence) -> dict[str, tuple[int, ...]]:
    """Device numbers by process."""
    return {s.name: numbers(s.device) for s in e.specs if s.device and not s.external}


def tool_and_driver(e: Evidence) -> Iterator[Finding]:
    """Whether the devices can be looked at."""
    if e.topology.devices.kind == "none":
        yield good("driver", "no devices are used (devices.kind = none)")
        return
    if e.devices is None:
        advice = "install the vendor's driver and tool; without it devices are used and not watched"
        yield warn("driver", "the devices cannot be looked at", e.no_devices, advice=advice)
        return
    driver = f", driver {e.driver}" if e.driver else ""
    yield good("driver", f"{e.devices.tool} lists {len(e.devices.devices)} devices{driver}")


def present(e: Evidence) -> Iterator[Finding]:
    """Those of the topology, and their device files."""
    wanted = _wanted(e)
    if not wanted:
        return
    if e.devices is not None:
        for name, its in wanted.items():
            if absent := [n for n in its if n not in e.devices.devices]:
                there = devices_shown(e.devices.devices)
                advice = "correct its devices in eccon.toml"
                yield bad("device-present", f"{name}: device {devices_shown(absent)} is not there",
                          f"there are {there}", advice=advice)  # fmt: skip
    if e.topology.devices.kind != "rbln":
        return
    all_of_them = {n for its in wanted.values() for n in its}
    refused = sorted(n for n in all_of_them if f"rbln{n}" in e.refused_nodes)
    lacking = sorted(n for n in all_of_them if f"rbln{n}" not in e.nodes | e.refused_nodes)
    if refused:
        advice = "give this user the right to open them, mostly by their group"
        yield bad("device-node", f"/dev/rbln may not be opened for {devices_shown(refused)}", advice=advice)
    if lacking and e.devices is None:
        advice = "install the driver, or correct the devices in eccon.toml"
        yield bad("device-node", f"/dev/rbln is not there for {devices_shown(lacking)}", advice=advice)


def free_and_grouped(e: Evidence) -> Iterator[Finding]:
    """An NPU takes one process; the devices of one process share a group."""
    if e.devices is None:
        return
    fine = True
    for name, its in _wanted(e).items():
        groups = {e.devices.devices[n].group for n in its if n in e.devices.devices} - {""}
        if len(groups) > 1:
            fine = False
            advice = "give it devices of one RSD group; `rbln-smi -g` shows them"
            yield bad("device-group", f"{name}: its devices are of groups {', '.join(sorted(groups))}",
                      f"devices {devices_shown(its)}", advice=advice)  # fmt: skip
        for n in its if e.devices.kind == "rbln" else ():
            for context in e.devices.holders(n):
                if context.pid not in e.our_pids:
                    fine = False
                    advice = f"end pid {context.pid}, or use another device"
                    evidence = f"pid {context.pid} ({context.process or 'unnamed'})"
                    yield bad("device-busy", f"{name}: device {n} is in use", evidence, advice=advice)
    if fine and _wanted(e):
        yield good("device-busy", "the devices are free or this cluster's own, and of one group a process")


def well(e: Evidence) -> Iterator[Finding]:
    """Status and P-state of the topology's own devices."""
    if e.devices is None:
        return
    mine = sorted({n for its in _wanted(e).values() for n in its})
    ill = False
    for n in mine:
        npu = e.devices.devices.get(n)
        for about, text in (e.devices.alarms(npu) if npu else {}).items():
            ill = True
            evidence = f"status {npu.status}, P-state {npu.pstate}" if npu else ""
            if about == "hot":
                yield warn("device-well", text, evidence, advice="look at the host's cooling")
            else:
                yield bad("device-well", text, evidence, advice="reset it, or reboot the host")
    if mine and not ill:
        yield good("device-well", f"devices {devices_shown(mine)} say that they are well")
    if mine and not any(npu.pstate for npu in e.devices.devices.values()):
        yield note("device-well", f"{e.devices.tool} tells no P-states")

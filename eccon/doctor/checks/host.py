"""Limits of the host: files, shared memory, CPUs, disk, clock."""

from collections.abc import Iterator

from eccon.doctor.evidence import Evidence
from eccon.doctor.finding import Finding, bad, good, note, warn
from eccon.model import Role

__all__ = ["clock", "cpus", "disk", "open_files", "shared_memory"]

GIB = 2**30
MIB = 2**20
FILES_WANTED, FILES_NEEDED = 65536, 4096
SHM_WANTED = GIB
SHM = "/dev/shm"  # noqa: S108  not a temporary file: its size is looked at


def open_files(e: Evidence) -> Iterator[Finding]:
    """A stream holds two sockets in the proxy and one in the PD."""
    soft, hard = e.host.open_files
    most = FILES_WANTED if hard < 0 else hard
    evidence = f"soft {soft}, hard {hard}"
    if most < FILES_NEEDED:
        advice = "raise it: LimitNOFILE in a unit, or /etc/security/limits.conf"
        yield bad("open-files", f"at most {most} files may be open", evidence, advice=advice)
    elif most < FILES_WANTED:
        advice = (
            f"raise the hard limit to {FILES_WANTED}: LimitNOFILE in a unit, or /etc/security/limits.conf"
        )
        yield warn("open-files", f"at most {most} files may be open", evidence, advice=advice)
    else:
        yield good("open-files", "enough files may be open", evidence)


def shared_memory(e: Evidence) -> Iterator[Finding]:
    """vLLM's processes and UCX talk through /dev/shm; containers often have 64 MiB of it."""
    size, free = e.host.shm_bytes, e.host.shm_free
    advice = "start the container with --shm-size=8g, or --ipc=host"
    if size is None:
        yield bad("shm", f"{SHM} is not there", advice=advice)
    elif size < SHM_WANTED:
        yield bad("shm", f"{SHM} has only {size / MIB:.0f} MiB", advice=advice)
    elif free < size // 10:
        yield warn("shm", f"{SHM} is nearly full: {free / MIB:.0f} MiB left",
                   advice="remove what dead processes left there")  # fmt: skip
    else:
        yield good("shm", f"{SHM} has {size / GIB:.0f} GiB")


def cpus(e: Evidence) -> Iterator[Finding]:
    """Each server takes half of the visible CPUs for its threads, and NIXL spins one thread in each."""
    servers = [s for s in e.specs if s.role is not Role.PROXY and not s.external]
    count = e.host.cpus
    evidence = f"{len(servers)} servers, {count} CPUs of {e.host.cpus_online}"
    if not servers or e.topology.launcher.kind != "vllm":
        return
    if count < len(servers) + 1:
        advice = "use fewer encoders, or a host with more CPUs: each server keeps one busy even when idle"
        yield warn("cpus", "fewer CPUs than servers", evidence, advice=advice)
    elif len(servers) > 2 and not _pinned(e):
        advice = "pin each server to CPUs of its own"
        text = f"each of {len(servers)} servers takes threads for half of all {count} CPUs"
        yield note("cpus", text, evidence, advice)
    else:
        yield good("cpus", "enough CPUs", evidence)


def _pinned(e: Evidence) -> bool:
    places = [e.topology.pd, e.topology.encoders, *e.topology.encoders.override]
    return any(getattr(place, "cpus", None) for place in places)


def disk(e: Evidence) -> Iterator[Finding]:
    """Logs and state."""
    free = e.host.state_free
    if free is None:
        return
    policy = e.topology.supervisor
    logs = policy.log_bytes * policy.log_files * len(e.specs)
    evidence = f"{free / MIB:.0f} MiB free, logs take up to {logs / MIB:.0f} MiB"
    if free < logs:
        advice = "make room, move ECCON_STATE_DIR, or lower supervisor.log_bytes"
        yield warn("disk", "the logs may fill the disk", evidence, advice=advice)
    else:
        yield good("disk", "room for logs and state", evidence)


def clock(e: Evidence) -> Iterator[Finding]:
    """Transfer times join stamps of several processes: on several hosts their clocks must agree."""
    spans = any(s.external for s in e.specs)
    state = e.clock.synchronised
    if state:
        yield good("clock", "the clock is synchronised")
    elif state is False and spans:
        advice = "run chrony or systemd-timesyncd on every host"
        yield warn("clock", "the clock is not synchronised, and the topology spans hosts", advice=advice)
    else:
        what = "is not synchronised" if state is False else "may or may not be synchronised"
        yield note("clock", f"the clock {what}; it matters when the topology spans hosts")

"""Gathers the evidence: reads files, asks the vendor's tool, tries imports. Changes nothing, ends in time."""

import ctypes
import getpass
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from eccon import launch
from eccon.config import Topology
from eccon.doctor.evidence import Clock, Compiled, Evidence, Host, Launcher, Login, Port
from eccon.launch import ProcessSpec, versions
from eccon.paths import ClusterPaths
from eccon.signals.devices import Reading, ToolError, reader
from eccon.signals.devices.tool import output_of
from eccon.supervisor import ports

__all__ = ["clock", "compiled", "evidence", "host", "launchers", "login", "port_holders"]

IMPORT_S = 60.0
"""The first import of NIXL after an installation compiles its files."""
STA_UNSYNC = 0x40


def evidence(
    topology: Topology,
    paths: ClusterPaths,
    *,
    our_pids: Iterable[int] = (),
    daemon_pid: int | None = None,
    guards: Iterable[tuple[str, str]] = (),
) -> Evidence:
    """All of it. `our_pids` are the processes of this cluster that run now, `daemon_pid` its daemon, `guards`
    the levels that they tell.
    """
    specs = tuple(launch.everything(topology, paths))
    devices, problem = _devices(topology.devices.kind)
    ours = frozenset(our_pids)
    there = {p.name: os.access(p, os.R_OK | os.W_OK) for p in Path("/dev").glob("rbln[0-9]*")}
    files = [f for f in (topology.model.api_key_file, topology.proxy.api_key_file) if f]
    return Evidence(
        topology=topology,
        specs=specs,
        python=platform.python_version(),
        launchers=tuple(launchers(topology)),
        compiled=None if topology.model.hub else compiled(topology.directory / topology.model.path),
        devices=devices,
        no_devices=problem,
        driver=_driver(topology.devices.kind),
        nodes=frozenset(n for n, usable in there.items() if usable),
        refused_nodes=frozenset(n for n, usable in there.items() if not usable),
        our_pids=ours,
        running=bool(ours),
        guards=tuple(guards),
        ports=tuple(port_holders(specs, ours)),
        host=host(paths),
        login=login(daemon_pid),
        clock=clock(),
        key_files={f: (topology.directory / f).stat().st_mode & 0o777 for f in files},
    )


def _devices(kind: str) -> tuple[Reading | None, str]:
    read = reader(kind)
    if read is None:
        return None, ""
    try:
        return read(), ""
    except ToolError as e:
        return None, str(e)


def _driver(kind: str) -> str:
    module = {"rbln": "rebellions", "cuda": "nvidia"}.get(kind, "")
    try:
        return Path(f"/sys/module/{module}/version").read_text().strip() if module else ""
    except OSError:
        return ""


def launchers(topology: Topology, *, imports: bool = True) -> Iterable[Launcher]:
    """Each vllm command once, with what its environment has; `imports` tries those that only a try shows."""
    processes: dict[str, list[str]] = {}
    for name, command in versions.launchers(topology).items():
        processes.setdefault(command, []).append(name)
    for command, names in processes.items():
        path = versions.command_path(command, topology.directory)
        if path is None:
            yield Launcher(command=command, processes=tuple(names))
            continue
        packages = versions.packages(command, topology.directory)
        sites = list(versions.site_packages(path))
        yield Launcher(
            command=command,
            processes=tuple(names),
            path=str(path),
            python=_python(path, sites),
            packages=packages,
            imports=_imports(path, ["nixl"] if imports and "nixl" in packages else []),
            ucx=any(
                True for site in sites for _ in site.glob("*nixl*libs/**/libplugin_UCX.so")
            ) or any(True for site in sites for _ in site.glob(".nixl*libs/**/libplugin_UCX.so")),
        )  # fmt: skip


def _python(command: Path, sites: Iterable[Path]) -> str:
    """By where its packages lie: `lib/python3.12/site-packages`."""
    for site in sites:
        if found := re.fullmatch(r"python(3\.\d+)", site.parent.name):
            return found[1]
    named = versions.python_of(command)
    found = re.fullmatch(r"python(3\.\d+)", named.resolve().name) if named else None
    return found[1] if found else ""


def _imports(command: Path, modules: Iterable[str]) -> dict[str, str]:
    """What importing each says in the interpreter of that command; "" when it goes well."""
    python = versions.python_of(command)
    if python is None or not python.is_file():
        return {}
    program = (
        "import importlib, sys\n"
        "try:\n importlib.import_module(sys.argv[1]); print('\\x00good')\n"
        "except BaseException as e: print(f'\\x00{type(e).__name__}: {e}')\n"
    )
    found = {}
    for module in modules:
        try:
            said = output_of([str(python), "-c", program, module], IMPORT_S).decode(errors="replace")
        except ToolError as e:
            found[module] = str(e)
            continue
        answer = said.rpartition("\x00")[2].strip() if "\x00" in said else "the interpreter ended"
        found[module] = "" if answer == "good" else answer
    return found


def compiled(directory: Path) -> Compiled:
    """A model directory's small files, and the names of the large ones."""
    faults: list[str] = []

    def read(name: str) -> dict[str, Any] | None:
        path = directory / name
        try:
            found = msgspec.json.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as e:
            faults.append(f"{path}: {e}")
            return None
        if not isinstance(found, dict):
            faults.append(f"{path}: is not a JSON object")
            return None
        return found

    rbln = read("rbln_config.json")
    # Written into the whole's file and into one of its own; older versions wrote the latter only.
    inside = (rbln or {}).get("visual")
    visual = dict(inside) if isinstance(inside, Mapping) and inside.get("_compile_cfgs") else None
    if visual is None:
        visual = read("visual/rbln_config.json") or (dict(inside) if isinstance(inside, Mapping) else {})
    files = [*directory.glob("*"), *directory.glob("visual/*")]
    return Compiled(
        directory=str(directory),
        files=frozenset(str(f.relative_to(directory)) for f in files if f.is_file()),
        rbln=rbln,
        visual=visual,
        config=read("config.json") or {},
        processor=read("preprocessor_config.json") or {},
        faults=tuple(faults),
    )


def port_holders(specs: Iterable[ProcessSpec], ours: frozenset[int]) -> Iterable[Port]:
    """Of the topology's ports, those that somebody listens on."""
    specs = list(specs)
    everything = {str(port): (port, ours) for spec in specs for port in spec.ports}
    others = ports.intruders(everything if ours else {})
    for spec in specs:
        for port in spec.ports:
            holder = ports.holder(port)
            if holder is None:
                continue
            other = others.get(str(port))
            stranger = holder if holder.pid not in ours else other
            mine = holder.pid in ours
            yield Port(
                process=spec.name,
                port=port,
                holder=str(stranger) if stranger is not None else "",
                listeners=2 if other is not None and mine else 1,
            )


def host(paths: ClusterPaths) -> Host:
    """Limits, as they are for this process."""
    shm = _usage(Path("/dev/shm"))  # noqa: S108  not a temporary file: its size is looked at
    place = next((p for p in (paths.root, *paths.root.parents) if p.is_dir()), Path("/"))
    state = _usage(place)
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        ephemeral = (int(low), int(high))
    except (OSError, ValueError):
        ephemeral = (32768, 60999)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Host(
        open_files=(soft, -1 if hard == resource.RLIM_INFINITY else hard),
        cpus=len(os.sched_getaffinity(0)),
        cpus_online=os.cpu_count() or 1,
        shm_bytes=None if shm is None else shm[0],
        shm_free=0 if shm is None else shm[1],
        ephemeral=ephemeral,
        state_free=None if state is None else state[1],
    )


def _usage(path: Path) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


def login(
    pid: int | None = None,
    *,
    proc: Path = Path("/proc"),
    etc: Path = Path("/etc/systemd"),
    lingers: Path = Path("/var/lib/systemd/linger"),
) -> Login:
    """Of the process `pid`, by default this one: a daemon that runs, else the shell that would start it."""
    user = getpass.getuser()
    try:
        lines = (proc / str(pid or "self") / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    group = next((line.split(":", 2)[2] for line in lines if line.startswith(("0::", "1:name=systemd"))), "")
    last = [part for part in group.split("/") if part.endswith((".scope", ".service"))][-1:]
    name = last[0] if last else ""
    session = name.startswith("session-") and name.endswith(".scope")
    # The manager of a user's own units is one itself.
    unit = name if name.endswith(".service") and not name.startswith("user@") else ""
    return Login(
        session=session,
        unit=unit if pid is not None and _ends_all(unit, "user@" in group) else "",
        kill_user_processes=_kills_user_processes(etc),
        linger=(lingers / user).exists(),
        user=user,
    )


def _ends_all(unit: str, of_user: bool) -> bool:
    """Whether the end of a unit is the end of its whole control group: unless its KillMode says otherwise."""
    if not unit:
        return False
    manager = ["systemctl", *(["--user"] if of_user else [])]
    try:
        said = output_of([*manager, "show", "--property=KillMode", "--value", unit], 5.0)
    except ToolError:
        return True
    return said.decode(errors="replace").strip() not in {"process", "none"}


def _kills_user_processes(etc: Path) -> bool:
    """The last word of logind.conf and its drop-ins; where they are silent, what logind itself says."""
    answer: bool | None = None
    for file in (etc / "logind.conf", *sorted((etc / "logind.conf.d").glob("*.conf"))):
        try:
            text = file.read_text(errors="replace")
        except OSError:
            continue
        for value in re.findall(r"^\s*KillUserProcesses\s*=\s*(\S+)", text, re.MULTILINE):
            answer = value.lower() in {"yes", "true", "1", "on"}
    if answer is not None:
        return answer
    login1 = ["org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager"]
    try:
        said = output_of(["busctl", "get-property", *login1, "KillUserProcesses"], 5.0)
    except ToolError:
        return False
    return said.split() == [b"b", b"true"]


class _Timex(ctypes.Structure):
    """The first fields of the kernel's `struct timex`; the rest is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("room", ctypes.c_byte * 256),
    )


def clock() -> Clock:
    """Whether the kernel's clock follows another."""
    try:
        state = _Timex()
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state))
    except (OSError, AttributeError):
        return Clock()
    return Clock() if answer < 0 else Clock(not state.status & STA_UNSYNC)

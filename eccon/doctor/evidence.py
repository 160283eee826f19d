"""What was seen of this host, as plain values: the checks know nothing else."""

from typing import Any

import msgspec

from eccon.config import Topology
from eccon.launch import ProcessSpec
from eccon.signals.devices import Reading

__all__ = ["Clock", "Compiled", "Evidence", "Host", "Launcher", "Login", "Port"]


class Launcher(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of one vllm command."""

    command: str
    processes: tuple[str, ...]
    path: str = ""
    """The file; empty: there is none."""
    python: str = ""
    """Version of its interpreter, as "3.12"; empty: it cannot be told."""
    packages: dict[str, str] = {}
    imports: dict[str, str] = {}
    """What importing a module there said; "" when it went well."""
    ucx: bool = False
    """Whether NIXL's plugin for UCX lies there."""


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """A model directory, as its files say."""

    directory: str
    files: frozenset[str] = frozenset()
    """Below the directory, with slashes."""
    rbln: dict[str, Any] | None = None
    """rbln_config.json; None: it is not there."""
    visual: dict[str, Any] = {}
    """The visual encoder's part of it."""
    config: dict[str, Any] = {}
    processor: dict[str, Any] = {}
    """preprocessor_config.json."""
    faults: tuple[str, ...] = ()
    """Files that are there and cannot be read."""


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A port of the topology that somebody listens on."""

    process: str
    port: int
    holder: str = ""
    """Who it is, when it is not of this cluster."""
    listeners: int = 0
    """Processes that listen on it; vLLM lets two share one."""


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to processes at the end of the session that they were started in."""

    session: bool = False
    """Whether this shell, or the running daemon, is in a log-in session's control group."""
    unit: str = ""
    """The service unit that it runs in, where that would end what the unit started; else empty."""
    kill_user_processes: bool = False
    linger: bool = False
    user: str = ""


class Clock(msgspec.Struct, frozen=True):
    """`synchronised` is None where the kernel does not tell."""

    synchronised: bool | None = None


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of this host and of who asks."""

    open_files: tuple[int, int] = (0, 0)
    """Soft and hard; -1: no limit."""
    cpus: int = 1
    """That this process may use."""
    cpus_online: int = 1
    shm_bytes: int | None = None
    """Size of /dev/shm; None: it is not there."""
    shm_free: int = 0
    memory_available: int | None = None
    ephemeral: tuple[int, int] = (32768, 60999)
    state_free: int | None = None
    """Bytes left where state and logs lie."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the checks look at."""

    topology: Topology
    specs: tuple[ProcessSpec, ...]
    python: str
    """Version of eccon's own interpreter."""
    launchers: tuple[Launcher, ...] = ()
    compiled: Compiled | None = None
    devices: Reading | None = None
    no_devices: str = ""
    """Why they could not be read."""
    driver: str = ""
    """Version of the kernel's driver; empty: unknown."""
    nodes: frozenset[str] = frozenset()
    """Device files that are there and can be opened: "rbln0"."""
    refused_nodes: frozenset[str] = frozenset()
    """Those that are there and cannot."""
    our_pids: frozenset[int] = frozenset()
    """Processes of this cluster that run now."""
    running: bool = False
    guards: tuple[tuple[str, str], ...] = ()
    """Level of the guarded connector in each process that has told it: see `eccon.model.Process.guard`."""
    ports: tuple[Port, ...] = ()
    host: Host = Host()
    login: Login = Login()
    clock: Clock = Clock()
    key_files: dict[str, int] = {}
    """Permission bits of files with keys in them."""

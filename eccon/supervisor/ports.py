"""Whether a TCP port is free, and who holds it.

With several API servers vLLM binds with SO_REUSEPORT, and would not notice another.
"""

import contextlib
import socket
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec

__all__ = ["Holder", "holder", "intruders", "is_free"]

LISTEN = "0A"
ANYWHERE = frozenset({"0" * 8, "0" * 32})
"""Addresses of all interfaces."""


class Holder(msgspec.Struct, frozen=True):
    """Who holds a port. `pid` is None when it cannot be told: another user's, or bound and not listening."""

    port: int
    pid: int | None = None
    command: str = ""

    def __str__(self) -> str:
        who = f"pid {self.pid} ({self.command})" if self.pid else "a process that cannot be named from here"
        return f"port {self.port} is held by {who}"

    @property
    def beside(self) -> str:
        """Of one that listens on a port of ours, in words."""
        return f"pid {self.pid} ({self.command}) listens on its port {self.port} too, and takes requests away"


def is_free(port: int, host: str = "") -> bool:
    """Whether nobody has bound the port on the addresses of `host` (empty: any)."""
    return _bindable(port, host) or (not _listeners(port) and _bindable(port, host, reuse=True))


def holder(port: int, host: str = "") -> Holder | None:
    """Who holds the port; None when it is free."""
    if is_free(port, host):
        return None
    inodes = _listeners(port)
    pid = _owner(inodes) if inodes else None
    return Holder(port, pid, _command(pid) if pid else "")


def intruders(asked: Mapping[str, tuple[int, AbstractSet[int]]]) -> dict[str, Holder | None]:
    """Other processes that listen on the ports of trees of ours, beside them or in their place.

    Args: asked: the port and the pids of each tree, by a name that the answer has too.
    """
    tables = _listening({port for port, _ in asked.values()})
    return {name: _intruder(port, tree, tables[port]) for name, (port, tree) in asked.items()}


def _intruder(port: int, tree: AbstractSet[int], listening: set[tuple[str, str]]) -> Holder | None:
    if not listening:
        return None
    ours = {inode for pid in tree for inode in _sockets(pid)}
    places = {address for address, inode in listening if inode in ours}
    others = {
        inode
        for address, inode in listening
        if inode not in ours and (not places or address in places or places & ANYWHERE or address in ANYWHERE)
    }
    pid = _owner(others) if others else None
    if pid is None or pid in tree:
        return None
    return Holder(port, pid, _command(pid))


def _bindable(port: int, host: str, *, reuse: bool = False) -> bool:
    """Without `reuse` a connection of an earlier server in TIME_WAIT is in the way too."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        if reuse:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def _listeners(port: int) -> set[str]:
    """Inodes of sockets that listen on the port."""
    return {inode for _, inode in _listening({port})[port]}


def _listening(wanted: Iterable[int]) -> dict[int, set[tuple[str, str]]]:
    """Address (as the kernel writes it) and inode of sockets that listen, for each port."""
    found: dict[int, set[tuple[str, str]]] = {port: set() for port in wanted}
    names = {f"{port:04X}": port for port in found}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            address, _, port = fields[1].rpartition(":")
            if fields[3] == LISTEN and port in names:
                found[names[port]].add((address, fields[9]))
    return found


def _owner(inodes: set[str]) -> int | None:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            for fd in (process / "fd").iterdir():
                if str(fd.readlink()) in wanted:
                    return int(process.name)
        except OSError:
            continue
    return None


def _sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    found = set()
    try:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(fd.readlink())
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    except OSError:
        return found
    return found


def _command(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended meanwhile"
    # A newline or an escape in it must not reach a table.
    words = "".join(c if c.isprintable() else " " for c in line).split()
    return " ".join(words)[:80] or "no command line"

"""Whether a TCP port is free, and who holds it. vLLM binds with SO_REUSEPORT: it would not notice another."""

import socket
from pathlib import Path

import msgspec

__all__ = ["Holder", "holder", "is_free"]

LISTEN = "0A"


class Holder(msgspec.Struct, frozen=True):
    """Who holds a port. `pid` is None when it cannot be told: another user's, or bound and not listening."""

    port: int
    pid: int | None = None
    command: str = ""

    def __str__(self) -> str:
        who = f"pid {self.pid} ({self.command})" if self.pid else "a process that cannot be named from here"
        return f"port {self.port} is held by {who}"


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
    found = set()
    suffix = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN and fields[1].endswith(suffix):
                found.add(fields[9])
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


def _command(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended meanwhile"
    return line[:80] or "no command line"

"""The sockets that the proxy listens on, bound before anything is served: whoever is in the way is named."""

import os
import socket
import stat
from pathlib import Path

from eccon_proxy.settings import Settings, SettingsError, admin_address

__all__ = ["admin_socket", "public_socket"]

LONGEST_PATH = 107
"""Bytes of a unix socket's path that Linux takes."""


def public_socket(settings: Settings) -> socket.socket:
    """The public port, bound; raises `SettingsError` with who is in the way."""
    return _tcp(settings.host, settings.port, "--port")


def _tcp(host: str, port: int, flag: str) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SettingsError(f"{host!r} is no address to listen on: {error}") from None
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise SettingsError(f"{flag} {port}: cannot listen on {host}:{port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock


def admin_socket(settings: Settings) -> tuple[socket.socket, Path | None]:
    """The admin socket, bound with mode 0600 in a directory of mode 0700, and its path to remove."""
    address = admin_address(settings)
    if address is not None:
        return _tcp(*address, "--admin"), None
    text = settings.admin
    path = Path(text.removeprefix("unix:")) if text else _default_path(settings.port)
    if len(os.fsencode(path)) > LONGEST_PATH:
        if text:
            raise SettingsError(f"--admin {path}: a socket's path has at most {LONGEST_PATH} bytes")
        path = Path(f"/tmp/eccon-{os.getuid()}") / f"proxy-{settings.port}.sock"  # noqa: S108  checked below
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _unix(path), path
    except OSError as error:
        raise SettingsError(f"--admin {path}: {error.strerror}") from None


def _default_path(port: int) -> Path:
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "eccon" / f"proxy-{port}" / "admin.sock"


def _unix(path: Path) -> socket.socket:
    parent = path.parent.stat()
    if path.parent == Path(f"/tmp/eccon-{os.getuid()}") and (  # noqa: S108
        parent.st_uid != os.getuid() or stat.S_IMODE(parent.st_mode) & 0o077
    ):
        raise SettingsError(f"--admin {path}: its directory belongs to somebody else or is open to others")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() or path.is_socket():
            _remove_stale(path)
        # The mode holds from the first moment: between bind and chmod anybody could connect.
        mask = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(mask)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _remove_stale(path: Path) -> None:
    if not path.is_socket():
        raise SettingsError(f"--admin {path}: exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise SettingsError(f"--admin {path}: in use ({error})") from None
    raise SettingsError(f"--admin {path}: another process listens there")

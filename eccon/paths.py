"""Where a cluster keeps its state, and where its sockets are. Nothing outside this module builds these paths.

The state directory is not the runtime directory: that vanishes at the user's last log-out.
"""

import os
import stat
from pathlib import Path

import msgspec

__all__ = ["ClusterPaths", "PathsError", "for_cluster", "state_home"]

SOCKET_PATH_MAX = 107
"""Bytes of a unix socket's path on Linux, less the final NUL (`sun_path` holds 108)."""


class PathsError(Exception):
    """A directory cannot be made, or is somebody else's; the message says which and what to do."""


class ClusterPaths(msgspec.Struct, frozen=True):
    """All paths of one cluster. `root` is made 0700 by `for_cluster`; the rest lies below it."""

    root: Path
    sockets: Path
    """Where sockets are: `root`, or a short directory when a path below `root` would be too long."""

    @property
    def control_socket(self) -> Path:
        """The daemon's control API."""
        return self.sockets / "control.sock"

    @property
    def admin_socket(self) -> Path:
        """The proxy's admin API."""
        return self.sockets / "admin.sock"

    @property
    def guard_socket(self) -> Path:
        """Takes the guarded connectors' events."""
        return self.sockets / "guard.sock"

    @property
    def lock(self) -> Path:
        """Held by the daemon as long as it lives."""
        return self.root / "lock"

    @property
    def state_file(self) -> Path:
        """What the daemon must know again after a restart."""
        return self.root / "state.json"

    @property
    def run(self) -> Path:
        """One directory a process and life: the shim's specification, status and exit."""
        return self.root / "run"

    @property
    def logs(self) -> Path:
        """Log files, one a process, rotated."""
        return self.root / "logs"

    @property
    def reserve(self) -> Path:
        """Room on the disk for a process that must be started though the disk is full."""
        return self.root / "reserve"

    def logging_config(self, *, named: bool = False) -> Path:
        """The logging configuration of a vLLM; `named` for those that leave their name to the format."""
        return self.root / ("vllm-logging-named.json" if named else "vllm-logging.json")


def state_home() -> Path:
    """`ECCON_STATE_DIR`, else `$XDG_STATE_HOME/eccon`, else `~/.local/state/eccon`."""
    if own := os.environ.get("ECCON_STATE_DIR"):
        return Path(own).absolute()
    if xdg := os.environ.get("XDG_STATE_HOME"):
        return Path(xdg).absolute() / "eccon"
    return Path.home() / ".local" / "state" / "eccon"


def for_cluster(name: str, *, create: bool = True) -> ClusterPaths:
    """The paths of the cluster called `name`; with `create`, its directories are there and private.

    Raises:
        PathsError: a directory cannot be made, or is not ours alone.
    """
    root = state_home() / name
    sockets = root
    if len(os.fsencode(root / "control.sock")) > SOCKET_PATH_MAX:
        import hashlib  # noqa: PLC0415  seldom needed, and the console is to draw soon

        digest = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
        sockets = Path("/tmp") / f"eccon-{os.getuid()}" / digest  # noqa: S108  owner and mode are checked
    paths = ClusterPaths(root, sockets)
    if create:
        for directory in (root, paths.run, paths.logs):
            _make_private(directory)
        if sockets != root:
            _make_private(sockets.parent)
            _make_private(sockets)
    return paths


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as e:
        msg = (
            f"{directory}: cannot be used as a state directory: {e.strerror}; set ECCON_STATE_DIR to another"
        )
        raise PathsError(msg) from e
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        msg = f"{directory}: is not a directory of ours; remove it or set ECCON_STATE_DIR to another place"
        raise PathsError(msg)
    if stat.S_IMODE(found.st_mode) & 0o077:
        directory.chmod(0o700)

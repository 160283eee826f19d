"""Starts a cluster's daemon, detached from whoever asks."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from eccon import config
from eccon.paths import ClusterPaths, for_cluster

__all__ = ["DaemonError", "start_daemon"]

ANSWER_TIMEOUT_S = 30.0


class DaemonError(Exception):
    """The daemon did not start; the message says why."""


def start_daemon(
    config_path: Path, *, linger_s: float | None = None, ephemeral: Path | None = None
) -> ClusterPaths:
    """Returns when the daemon's socket answers; one that runs already is as good.

    Its environment is the caller's: the cluster's processes inherit it.

    Raises:
        ConfigError, PathsError: what it was given cannot be used.
        DaemonError: it ended at once.
    """
    topology = config.load(config_path)
    paths = for_cluster(topology.name)
    if answers(paths.control_socket):
        return paths
    read_end, write_end = os.pipe()
    argv = [sys.executable, "-m", "eccon.supervisor", "--config", str(config_path.absolute())]
    argv += ["--detach", str(write_end)]
    argv += ["--linger", str(linger_s)] if linger_s is not None else []
    argv += ["--ephemeral", str(ephemeral)] if ephemeral is not None else []
    try:
        with (paths.root / "daemon.err").open("wb") as err:
            subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                pass_fds=(write_end,),
                start_new_session=True,
                env={k: v for k, v in os.environ.items() if k != "ECCON_LIFE"},
                timeout=ANSWER_TIMEOUT_S,
                check=True,
            )
        os.close(write_end)
        write_end = -1
        with os.fdopen(read_end, "rb", closefd=False) as pipe:
            said = pipe.readline().decode(errors="replace").strip()
    except (OSError, subprocess.SubprocessError) as e:
        msg = f"the daemon could not be started: {e}"
        raise DaemonError(msg) from e
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)
    if said != "ok" and not answers(paths.control_socket):
        raise DaemonError(said or _last_words(paths))
    return paths


def answers(path: Path) -> bool:
    """Whether a daemon listens on a control socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(2)
        try:
            s.connect(str(path))
        except OSError:
            return False
    return True


def _last_words(paths: ClusterPaths) -> str:
    try:
        lines = (paths.root / "daemon.err").read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return f"the daemon ended at once: {lines[-1] if lines else 'without a word'} ({paths.root}/daemon.err)"

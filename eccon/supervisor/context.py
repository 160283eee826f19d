"""What every owner needs of the cluster around it, so that an owner knows nothing of the others."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from eccon.config import Topology
from eccon.paths import ClusterPaths
from eccon.signals.milestones import History
from eccon.supervisor.board import Board
from eccon.supervisor.devices import DeviceWatch
from eccon.supervisor.probe import Prober
from eccon.supervisor.proxylink import ProxyLink

__all__ = ["Context"]


class Context(msgspec.Struct):
    """Shared by the owners of one cluster. `topology` is replaced by a reload."""

    topology: Topology
    paths: ClusterPaths
    board: Board
    prober: Prober
    proxy: ProxyLink
    history: History
    devices: DeviceWatch
    waits_for: Callable[[str], str]
    """Why a process may not start yet; empty when it may."""
    stirred: Callable[[str], None]
    """A process changed its state: others may be waiting for it, and it must be remembered."""
    became_ready: Callable[[str], Coroutine[Any, Any, None]]
    flush_pd: Callable[[], Awaitable[bool]]
    """A text request to the PD, so that it takes what encoders have pushed; True when it was answered."""
    pd_lives: Callable[[], bool]
    """Whether there is a PD that a careless stop could take along."""
    tree: Callable[[str], frozenset[int]]
    """Pids of a process and its tree, as far as they are known by now."""
    pause_media: Callable[[str, bool], Awaitable[None]]
    """No images to the PD until it is ready again, for the reason given. True: nor those under way."""

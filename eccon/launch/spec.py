"""What it takes to start one process, and which port and device an encoder gets."""

from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import msgspec

from eccon.config import Topology
from eccon.model import Role

__all__ = [
    "EncoderSlot",
    "NoRoomError",
    "ProcessSpec",
    "devices_shown",
    "loopback_for",
    "next_slot",
    "numbers_of",
    "slots",
    "split_url",
]


class NoRoomError(Exception):
    """No free device or port for another encoder; the message says which."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start. `env` is laid over the daemon's own environment less `unset`."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    unset: tuple[str, ...] = ()
    cwd: str
    host: str
    """Where it can be reached from this host."""
    port: int
    url: str
    device: str = ""
    ports: tuple[int, ...]
    """Every TCP port that it listens on, `port` first; none for an external one."""
    cpus: tuple[int, ...] = ()
    """That it may run on; empty: any."""
    external: bool = False
    """Started by somebody else: there is no `argv`, it is watched and never signalled."""


class EncoderSlot(msgspec.Struct, frozen=True):
    """Place of one encoder. `device` is None where the topology has no devices."""

    index: int
    port: int
    device: int | None = None

    @property
    def name(self) -> str:
        """As shown everywhere, and its id in the proxy."""
        return f"encoder-{self.index}"


def slots(topology: Topology) -> tuple[EncoderSlot, ...]:
    """The places of the configured encoders."""
    return tuple(_slot(topology, i) for i in range(topology.encoders.count))


def _slot(topology: Topology, index: int) -> EncoderSlot:
    e, own = topology.encoders, topology.encoders.overridden(index)
    port = e.port + index if own.port is None else own.port
    if own.external:
        return EncoderSlot(index, split_url(own.url)[1])
    if topology.devices.kind == "none":
        return EncoderSlot(index, port)
    device = e.devices[index] if own.device is None and index < len(e.devices) else own.device
    return EncoderSlot(index, port, device)


def next_slot(
    topology: Topology,
    used: Iterable[EncoderSlot],
    port_is_free: Callable[[int], bool],
    device_is_free: Callable[[int], bool] = lambda _: True,
    more_devices: Iterable[int] = (),
) -> EncoderSlot:
    """The place for one more encoder: lowest free index, first free spare device, next free port.

    What is overridden for that index comes first where it is free.

    Raises:
        NoRoomError: no device or no port is left.
    """
    taken = list(used)
    index = next(i for i in range(len(taken) + 1) if i not in {s.index for s in taken})
    own = topology.encoders.overridden(index)
    if own.external:
        return _slot(topology, index)
    device = None
    if topology.devices.kind != "none":
        busy = {s.device for s in taken}
        wanted = [own.device] if own.device is not None else []
        spares = (*wanted, *topology.encoders.devices, *more_devices)
        device = next((d for d in spares if d not in busy and device_is_free(d)), None)
        if device is None:
            msg = (
                "no free device for another encoder: all of encoders.devices "
                f"({devices_shown(topology.encoders.devices)}) are in use; add one there"
            )
            raise NoRoomError(msg)
    reserved = {s.port for s in taken} | {topology.proxy.port, topology.pd.port, topology.connector.port}
    first = topology.encoders.port
    for port in (own.port or first + index, *range(first, min(first + 2048, 65536))):
        if port not in reserved and port < 65536 and port_is_free(port):
            return EncoderSlot(index, port, device)
    msg = f"no free port for another encoder from {first} on"
    raise NoRoomError(msg)


def loopback_for(host: str) -> str:
    """Where what listens on `host` can be reached from this host."""
    return "127.0.0.1" if host in {"0.0.0.0", "::", ""} else host


def split_url(url: str) -> tuple[str, int]:
    """Host and port of an http URL."""
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)


def numbers_of(text: str) -> tuple[int, ...]:
    """`0-3,8` as (0, 1, 2, 3, 8)."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def devices_shown(devices: Iterable[int]) -> str:
    """`[0,1,2,3,8]` as "0-3,8"."""
    runs: list[list[int]] = []
    for d in sorted(devices):
        if runs and d == runs[-1][-1] + 1:
            runs[-1].append(d)
        else:
            runs.append([d])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)

"""The guard's part of `ec_connector_extra_config`, read leniently: a bad value never stops an engine."""

import math
import os
import tempfile
from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec

__all__ = ["MAX_WAIT_S", "Settings", "request_wait"]

MAX_WAIT_S = 600.0
Default = TypeVar("Default", float, None)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and bytes. The key of each field is its name with `guard_` before it (`mode`: `guard`)."""

    mode: Literal["auto", "on"] = "auto"
    """"auto": only with the versions it was proven with; "on": wherever the attributes are there."""
    wait_s: float = 3.0
    """Longest wait of a request for its items (PD), or for the way to the PD (encoder)."""
    pull_timeout_s: float = 3.0
    """A pull that takes longer fails its item; what comes of it later is kept all the same."""
    crc: bool = True
    """Encoder: send a checksum; PD: check the one that was sent."""
    delivery_wait_s: float = 1.0
    """Longest wait of an encoder's step for the PD's acknowledgements; 0: none, nothing is proven then.

    They take some 10 to 30 ms; more when the host is loaded, or the PD's forward holds the interpreter."""
    staging_bytes: int = 8 * 2**30
    """Tensors kept on the PD; beyond, the oldest go, those already used first."""
    staged_ttl_s: float = 60.0
    """How long the PD keeps an item that no request wants; a request that is queued or runs wants its own.

    vLLM's own scheduler asks only for the first of its queue: those behind it do not count there."""
    name: str = ""
    """Who speaks in the events: as the supervisor calls this process."""
    events: str = ""
    """Path of a unix datagram socket that takes events; empty: none are sent."""
    directory: str = ""
    """Where the channel between worker and scheduler lies; empty: one of the user's own under /tmp."""

    @property
    def channel_directories(self) -> list[str]:
        """Where the channel's socket may lie, the one that was given first."""
        own = f"{tempfile.gettempdir()}/eccon-guard-{os.getuid()}"
        return [self.directory, own] if self.directory else [own]

    @classmethod
    def read(cls, extra: Mapping[str, object]) -> tuple["Settings", list[str]]:
        """Settings from the extra configuration, and a line about each value that cannot be used."""
        values: dict[str, object] = {}
        faults = []
        for field in cls.__struct_fields__:
            key = "guard" if field == "mode" else f"guard_{field}"
            if key not in extra:
                continue
            try:
                one = msgspec.convert({field: extra[key]}, cls)
            except msgspec.ValidationError as e:
                faults.append(f"{key} = {extra[key]!r}: {e}; the default is used")
                continue
            value = getattr(one, field)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and not 0 <= value <= (MAX_WAIT_S if field.endswith("_s") else 2**62):
                faults.append(f"{key} = {value!r}: out of range; the default is used")
                continue
            values[field] = value
        return msgspec.convert(values, cls), faults


def request_wait(params: object, default: Default) -> float | Default:
    """Seconds that a request may wait: its own `ec_transfer_params.ec_guard_wait_s`, else `default`."""
    if not isinstance(params, Mapping):
        return default
    wanted = params.get("ec_guard_wait_s")
    if isinstance(wanted, bool) or not isinstance(wanted, (int, float)) or not math.isfinite(wanted):
        return default
    return min(max(float(wanted), 0.0), MAX_WAIT_S)

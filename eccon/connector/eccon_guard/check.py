"""What is possible with the vLLM and vllm-rbln at hand, looked up before anything of theirs is changed.

gate     vLLM's scheduler asks the connector before it schedules a request: nothing is stalled
wrap     it does not, but its class can be made to, in memory
hooks    it cannot: a missing item stalls the engine for `guard_wait_s`, then only its request fails
vendor   the vendor's connector as it is
"""

from collections.abc import Callable, Iterable
from importlib import metadata
from types import ModuleType
from typing import Any, Literal

import msgspec

from .settings import Settings
from .wire import Message, Tensor

__all__ = ["PROVEN", "Level", "Verdict", "decide", "names_in", "versions"]

Level = Literal["gate", "wrap", "hooks", "vendor"]
PROVEN = frozenset({("0.30.0", "0.12.0")})
"""vLLM and vllm-rbln that the guard was tried with."""

WORKER_METHODS = (
    "_ack_receiver_loop", "_admit_producer_entry", "_drain_acks", "_evict_producer_entry", "_receiver_loop",
    "_send_ack_if_unsent", "save_caches", "shutdown", "start_load_caches",
)  # fmt: skip
WORKER_STATE = (
    "_ack_host", "_ack_port", "_ack_sent", "_backends", "_engine_id", "_incoming_acks", "_known_ack_addrs",
    "_known_ack_addrs_lock", "_metadata_queue_max", "_mm_hash_ack_addr", "_nixl_agent", "_pull_sock",
    "_push_addr", "_push_sock", "_receiver_thread", "_registered_caches", "_registered_descs",
    "_registered_timestamps", "_stop_event", "_tensor_registry", "_zmq_ctx",
)  # fmt: skip
MODULE_NAMES = (
    "ECNixlAck", "ECNixlConnectorMetadata", "MMMeta", "RblnECNixlConnectorScheduler", "aligned_tensor",
)  # fmt: skip
BASE_HOOKS = ("ensure_cache_available", "request_finished", "start_save_caches", "take_unavailable_requests")
ASKS = frozenset({"ensure_cache_available", "_ec_transfer_pending"})
QUEUES = frozenset({"waiting", "skipped_waiting", "running", "ec_connector"})
QUEUE_METHODS = ("prepend_request", "remove_requests")


class Verdict(msgspec.Struct, frozen=True):
    """The level in force, and why it is not a higher one."""

    level: Level
    reason: str = ""


def versions() -> tuple[str, str]:
    """vLLM's and vllm-rbln's, without local parts (`0.30.0+cpu` is 0.30.0); empty for what is not there."""

    def one(distribution: str) -> str:
        try:
            return metadata.version(distribution).partition("+")[0]
        except metadata.PackageNotFoundError:
            return ""

    return one("vllm"), one("vllm-rbln")


def names_in(function: Callable[..., object] | None) -> frozenset[str]:
    """Attributes and globals that a function's own code names."""
    code = getattr(function, "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset()


def decide(
    settings: Settings,
    found: tuple[str, str],
    vendor: ModuleType,
    base: type,
    scheduler: type,
    queue: type,
    *,
    role: str,
    workers: int,
) -> Verdict:
    """The highest level that can be had, from classes alone; both processes come to the same."""
    if settings.mode == "auto" and found not in PROVEN:
        return Verdict("vendor", f"vLLM {found[0] or '?'} with vllm-rbln {found[1] or '?'} was not tried")
    if role not in {"ec_consumer", "ec_producer"}:
        return Verdict("vendor", f"ec_role {role} is not supported")
    if workers != 1:
        return Verdict("vendor", f"{workers} workers in one engine are not supported")
    if lacking := _lacking(vendor, base):
        return Verdict("vendor", f"the vendor's connector has changed: {lacking}")
    if "take_unavailable_requests" not in names_in(getattr(scheduler, "update_from_output", None)):
        return Verdict("vendor", f"{scheduler.__name__} cannot fail a single request")
    if ASKS & names_in(getattr(scheduler, "schedule", None)):
        return Verdict("gate")
    if missing := _not_wrappable(scheduler, queue):
        return Verdict("hooks", f"{scheduler.__name__} cannot be wrapped: {missing}")
    return Verdict("wrap")


def _lacking(vendor: ModuleType, base: type) -> str:
    lost: list[str] = [n for n in MODULE_NAMES if not hasattr(vendor, n)]
    worker: Any = getattr(vendor, "RblnECNixlConnectorWorker", None)
    if worker is None:
        return "no RblnECNixlConnectorWorker"
    lost += [n for n in WORKER_METHODS if not callable(getattr(worker, n, None))]
    state = names_in(worker.__init__)
    lost += [n for n in WORKER_STATE if n not in state]
    lost += [n for n in BASE_HOOKS if not callable(getattr(base, n, None))]
    ours = set(Message.__struct_fields__) - {"ec_guard_crc32"}
    lost += _fields("ECNixlMetadata", vendor, ours)
    lost += _fields("ECNixlTensorInfo", vendor, set(Tensor.__struct_fields__))
    return ", ".join(lost)


def _fields(name: str, vendor: ModuleType, wanted: Iterable[str]) -> list[str]:
    has = set(getattr(getattr(vendor, name, None), "__struct_fields__", ()))
    return [] if has == set(wanted) else [f"fields of {name}"]


def _not_wrappable(scheduler: type, queue: type) -> str:
    if lost := QUEUES - names_in(getattr(scheduler, "schedule", None)):
        return f"no {', '.join(sorted(lost))} in its schedule"
    lacking = [m for m in QUEUE_METHODS if not callable(getattr(queue, m, None))]
    return f"its queues have no {', '.join(lacking)}" if lacking else ""

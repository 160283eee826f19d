"""The guard's parts that need neither vLLM nor a socket."""

import ctypes
import types
from collections import deque
from typing import Any

import msgspec
import pytest

from eccon.connector.eccon_guard import check, wrap
from eccon.connector.eccon_guard.calm import calm
from eccon.connector.eccon_guard.gate import Gate
from eccon.connector.eccon_guard.notes import Board, Note, decode, encode
from eccon.connector.eccon_guard.settings import Settings, request_wait
from eccon.connector.eccon_guard.store import GRACE_S, Store
from eccon.connector.eccon_guard.wire import Message, Tensor, crc32_at, fault
from eccon.connector.eccon_guard.wire import decode as decode_message
from eccon.connector.eccon_guard.wire import encode as encode_message


class Clock:
    """Time that goes on when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# settings


def test_settings_are_read_from_the_extra_configuration() -> None:
    extra = {"guard": "on", "guard_wait_s": 5, "guard_crc": False, "pull_port": 1, "guard_name": "pd"}
    settings, faults = Settings.read(extra)
    assert (settings.mode, settings.wait_s, settings.crc, settings.name) == ("on", 5.0, False, "pd")
    assert faults == []


@pytest.mark.parametrize(
    "extra",
    [
        {"guard_wait_s": "long"},
        {"guard_wait_s": -1},
        {"guard_wait_s": float("nan")},
        {"guard_wait_s": float("inf")},
        {"guard_wait_s": True},
        {"guard": "maybe"},
        {"guard_crc": 1},
        {"guard_staging_bytes": -1},
    ],
)
def test_a_value_that_cannot_be_used_is_told_and_the_default_holds(extra: dict[str, object]) -> None:
    settings, faults = Settings.read(extra)
    assert settings == Settings()
    assert len(faults) == 1
    assert faults[0].startswith(next(iter(extra)))


@pytest.mark.parametrize(
    ("params", "wait"),
    [
        (None, 3.0),
        ("5", 3.0),
        ({}, 3.0),
        ({"ec_guard_wait_s": 7}, 7.0),
        ({"ec_guard_wait_s": 0}, 0.0),
        ({"ec_guard_wait_s": -4}, 0.0),
        ({"ec_guard_wait_s": 1e9}, 600.0),
        ({"ec_guard_wait_s": True}, 3.0),
        ({"ec_guard_wait_s": "7"}, 3.0),
        ({"ec_guard_wait_s": float("nan")}, 3.0),
    ],
)
def test_a_request_may_say_how_long_it_waits(params: object, wait: float) -> None:
    assert request_wait(params, 3.0) == wait


# wire


def tensor(nbytes: int = 8, shape: list[int] | None = None, address: int = 4096) -> Tensor:
    return Tensor(address, nbytes, 0, shape or [2, 2], "torch.float16")


def message(**changes: Any) -> Message:
    made = Message("engine", "hash", b"agent", tensor(), "127.0.0.1", 1)
    return msgspec.structs.replace(made, **changes)


def test_the_vendors_decoder_reads_our_message_and_ours_the_vendors() -> None:
    class Theirs(msgspec.Struct):
        engine_id: str
        mm_hash: str
        agent_metadata: bytes
        tensor: Tensor
        ack_host: str = ""
        ack_port: int = 0

    ours = message(ec_guard_crc32=7)
    theirs = msgspec.msgpack.decode(encode_message(ours), type=Theirs)
    assert (theirs.mm_hash, theirs.tensor, theirs.ack_port) == ("hash", tensor(), 1)
    back = decode_message(msgspec.msgpack.encode(theirs))
    assert back == message(ec_guard_crc32=None)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", b"junk", msgspec.msgpack.encode({"engine_id": 1})])
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_message(raw)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (tensor(), ""),
        (tensor(9), "its shape and its size differ"),
        (tensor(-8), "its shape and its size differ"),
        (tensor(shape=[-2, -2]), "its shape is not one"),
        (Tensor(4096, 8, 0, [], "torch.float16"), "its shape is not one"),
        (tensor(8, [1] * 99), "its shape is not one"),
        (tensor(address=0), "its address is not one"),
        (tensor(2_000_000, [1000, 1000]), "2000000 bytes are more than guard_staging_bytes"),
        (Tensor(4096, 8, 0, [2, 2], "torch.qint"), "dtype 'torch.qint' is not known"),
    ],
)
def test_a_tensor_that_cannot_be_is_not_pulled(told: Tensor, why: str) -> None:
    assert fault(told, 1_000_000) == why


def test_the_checksum_is_of_the_memory() -> None:
    memory = (ctypes.c_char * 4096)()
    before = crc32_at(ctypes.addressof(memory), 4096)
    assert crc32_at(ctypes.addressof(memory), 4096) == before
    memory[17] = b"x"
    assert crc32_at(ctypes.addressof(memory), 4096) != before


# the scheduler's picture


def test_a_note_comes_through() -> None:
    assert decode(encode(Note("bad", "h", "why", 1.0))) == Note("bad", "h", "why", 1.0)


def test_an_item_is_staged_bad_pending_gone() -> None:
    import time

    board = Board()
    board.take(Note("bad", "h", "encoder gone", time.time()))
    assert (board.staged("h"), board.bad("h")) == (False, "encoder gone")
    board.take(Note("pending", "h"))
    assert board.bad("h") == ""
    board.take(Note("staged", "h"))
    assert (board.staged("h"), board.bad("h")) == (True, "")
    board.take(Note("gone", "h"))
    assert not board.staged("h")


def test_a_failure_is_forgotten_in_time() -> None:
    board = Board()
    board.take(Note("bad", "h", "long ago", 1.0))
    assert board.bad("h") == ""


def test_a_hash_that_zeros_stood_in_for_is_never_used_again() -> None:
    board = Board()
    board.take(Note("placeholder", "h", "missing"))
    board.take(Note("staged", "h"))
    assert board.bad("h") == "the prefix cache holds zeros in its place"


def test_an_outcome_counts_only_for_requests_that_came_before_it() -> None:
    board = Board()
    board.take(Note("outcome", "h", "delivered", 50.0))
    assert board.outcome("h", 49.0) == "delivered"
    assert board.outcome("h", 51.0) == "unknown"
    assert board.outcome("other", 0.0) == "unknown"


def test_the_link_and_a_new_start() -> None:
    board = Board()
    seen = []
    for note in (Note("link", text="up"), Note("staged", "h"), Note("restart")):
        board.take(note)
        seen.append((board.link_up, board.staged("h")))
    assert seen == [(True, False), (True, True), (False, False)]


# the gate


def test_a_request_waits_for_its_items_and_passes() -> None:
    gate = Gate(Clock())
    assert not gate.check("r", ["h"], "", 3.0)
    waiting = [gate.waiting]
    assert gate.check("r", [], "", 3.0)
    waiting.append(gate.waiting)
    assert waiting == [True, False]
    assert gate.take() == {}


def test_a_request_that_waited_in_vain_fails_once() -> None:
    clock = Clock()
    gate = Gate(clock)
    assert not gate.check("r", ["h"], "", 3.0)
    clock.now += 2.9
    assert not gate.check("r", ["h"], "", 3.0)
    assert gate.take() == {}
    clock.now += 0.2
    assert not gate.check("r", ["h"], "", 3.0)
    assert gate.take() == {"r": "h did not come within 3 s"}
    assert not gate.check("r", [], "", 3.0)  # told already: it is not scheduled any more
    assert gate.take() == {}
    gate.forget("r")
    assert gate.check("r", [], "", 3.0)


def test_a_lost_item_fails_its_request_at_once() -> None:
    gate = Gate(Clock())
    assert not gate.check("r", ["h"], "h: encoder gone", 3.0)
    assert gate.take() == {"r": "h: encoder gone"}


def test_a_request_that_left_is_forgotten() -> None:
    gate = Gate(Clock())
    gate.check("r", ["h"], "", 0.0)
    gate.forget("r")
    assert gate.take() == {}
    gate.fail("s", "placeholder")
    gate.fail("s", "placeholder")
    assert gate.take() == {"s": "placeholder"}
    gate.fail("s", "placeholder")
    assert gate.take() == {}


# what the PD keeps


def test_the_store_lets_go_by_age_after_it_has_said_so() -> None:
    clock = Clock()
    gone: list[tuple[str, str]] = []
    store = Store(1000, 60.0, lambda h, why: gone.append((h, why)), clock)
    store.put("a", "tensor a", 10, 1)
    clock.now += 61
    store.sweep()
    assert gone == [("a", "ttl")]
    assert "a" not in store
    assert store.get("a") == "tensor a"  # for a request that passed before it was said
    clock.now += GRACE_S + 0.1
    store.sweep()
    assert store.get("a") is None


def test_the_store_lets_go_by_bytes_what_was_used_first() -> None:
    clock = Clock()
    gone: list[tuple[str, str]] = []
    store = Store(100, 60.0, lambda h, why: gone.append((h, why)), clock)
    for name in "abc":
        clock.now += 1
        store.put(name, name, 40, None)
        if name == "b":
            store.get("b")
    assert gone == [("b", "room")]
    assert sorted(store.hashes()) == ["a", "c"]
    store.put("d", "d", 40, None)
    assert gone == [("b", "room"), ("a", "room")]


def test_what_is_wanted_does_not_grow_old() -> None:
    clock = Clock()
    gone: list[str] = []
    store = Store(1000, 60.0, lambda h, _why: gone.append(h), clock)
    for name in "ab":
        store.put(name, name, 10, None)
    for _ in range(4):
        clock.now += 40
        store.want(("a", "never came"))
        store.sweep()
    assert (gone, store.hashes()) == (["b"], ["a"])
    store.want("b")
    assert "b" not in store


def test_the_same_bytes_are_not_pulled_again() -> None:
    clock = Clock()
    store = Store(100, 60.0, lambda _h, _why: None, clock)
    store.put("a", "first", 40, 7)
    clock.now += 50
    assert store.renew("a", 7)
    assert not store.renew("a", 8)
    assert not store.renew("b", 7)
    clock.now += 50
    store.sweep()
    assert "a" in store
    store.put("a", "second", 60, 8)
    assert store.get("a") == "second"
    assert store.hashes() == ["a"]


# hooks


def test_a_hook_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    @calm(lambda: True)
    def hook(value: int) -> bool:
        return 1 // value == 1

    assert hook(1)
    assert hook(0)
    assert hook(0)
    assert [r.message for r in caplog.records] == ["EC guard: hook failed; the engine goes on"]


# what is possible


def vendor(**changes: Any) -> types.ModuleType:
    """A module with all that the guard uses."""

    class Made(msgspec.Struct):
        engine_id: str
        mm_hash: str
        agent_metadata: bytes
        tensor: Tensor
        ack_host: str = ""
        ack_port: int = 0

    lines = "\n".join(f"    self.{n} = 1" for n in check.WORKER_STATE if n not in changes.get("without", ()))
    space: dict[str, Any] = {}
    exec(f"def __init__(self):\n{lines}\n", space)  # noqa: S102  names in code are what is looked for
    methods = {n: print for n in check.WORKER_METHODS if n not in changes.get("without", ())}
    module = types.ModuleType("vendor")
    for name in check.MODULE_NAMES:
        setattr(module, name, object)
    module.RblnECNixlConnectorWorker = type("W", (), {"__init__": space["__init__"], **methods})  # type: ignore[attr-defined]
    module.ECNixlMetadata = Made  # type: ignore[attr-defined]
    module.ECNixlTensorInfo = changes.get("info", Tensor)  # type: ignore[attr-defined]
    return module


class Base:
    def ensure_cache_available(self) -> None: ...
    def request_finished(self) -> None: ...
    def start_save_caches(self) -> None: ...
    def take_unavailable_requests(self) -> None: ...


class Asking:
    ec_connector: Any

    def schedule(self) -> None:
        self.ec_connector.ensure_cache_available(None, 0)

    def update_from_output(self) -> None:
        self.ec_connector.take_unavailable_requests()


class Silent(Asking):
    waiting: Any
    skipped_waiting: Any
    running: Any

    def schedule(self) -> None:
        _ = self.waiting, self.skipped_waiting, self.running, self.ec_connector


class Strange(Asking):
    def schedule(self) -> None: ...


class Deaf(Asking):
    def update_from_output(self) -> None: ...


class Queue(deque[Any]):
    def remove_requests(self, requests: list[Any]) -> None:
        for request in requests:
            self.remove(request)

    def prepend_request(self, request: Any) -> None:
        self.appendleft(request)


PROVEN = next(iter(check.PROVEN))


def decide(
    mode: str = "auto",
    found: tuple[str, str] = PROVEN,
    module: types.ModuleType | None = None,
    scheduler: type = Asking,
    queue: type = Queue,
    role: str = "ec_consumer",
    workers: int = 1,
) -> check.Verdict:
    settings, _ = Settings.read({"guard": mode})
    return check.decide(
        settings, found, module or vendor(), Base, scheduler, queue, role=role, workers=workers
    )


def test_step_by_step_down() -> None:
    assert decide().level == "gate"
    assert decide(scheduler=Silent).level == "wrap"
    assert decide(scheduler=Silent, queue=deque) == check.Verdict(
        "hooks", "Silent cannot be wrapped: its queues have no prepend_request, remove_requests"
    )
    assert decide(scheduler=Strange).level == "hooks"
    assert decide(scheduler=Deaf) == check.Verdict("vendor", "Deaf cannot fail a single request")


def test_auto_is_for_proven_versions_and_on_for_all_that_fit() -> None:
    assert decide(found=("0.31.0", "0.12.0")) == check.Verdict(
        "vendor", "vLLM 0.31.0 with vllm-rbln 0.12.0 was not tried"
    )
    assert decide(mode="on", found=("0.31.0", "0.12.0")).level == "gate"


@pytest.mark.parametrize("name", ["_receiver_loop", "_nixl_agent", "_evict_producer_entry", "_incoming_acks"])
def test_a_changed_vendor_is_left_alone(name: str) -> None:
    verdict = decide(mode="on", module=vendor(without=(name,)))
    assert verdict == check.Verdict("vendor", f"the vendor's connector has changed: {name}")


def test_a_changed_wire_is_left_alone() -> None:
    class Other(msgspec.Struct):
        base_addr: int

    assert decide(module=vendor(info=Other)).level == "vendor"
    assert decide(role="ec_both").level == "vendor"
    assert decide(workers=2).level == "vendor"
    assert decide(module=types.ModuleType("empty")).level == "vendor"


# the wrapped scheduler


class Request:
    def __init__(self, name: str, *, items: bool = True) -> None:
        self.name = name
        self.mm_features = [name] if items else []
        self.num_computed_tokens = 0


class Connector:
    guard_level = "wrap"

    def __init__(self, *ready: str) -> None:
        self.ready = set(ready)

    def ensure_cache_available(self, request: Request, _computed: int) -> bool:
        return request.name in self.ready


def wrapped() -> Any:
    class Scheduler:
        """As vllm-rbln's: takes what waits, asks nobody."""

        def __init__(self, connector: object) -> None:
            self.ec_connector = connector
            self.waiting = Queue()
            self.skipped_waiting = Queue()
            self.fails = False

        def schedule(self, throttle: bool = False) -> list[str]:  # noqa: ARG002
            if self.fails:
                raise RuntimeError("step")
            taken = [*self.skipped_waiting, *self.waiting]
            self.waiting.clear()
            self.skipped_waiting.clear()
            return [r.name for r in taken]

    wrap.install(Scheduler)
    wrap.install(Scheduler)
    return Scheduler


def test_a_wrapped_scheduler_holds_back_what_is_not_ready() -> None:
    connector = Connector("b")
    scheduler = wrapped()(connector)
    scheduler.waiting.extend([Request("a"), Request("b"), Request("text", items=False), Request("c")])
    scheduler.skipped_waiting.append(Request("d"))
    assert scheduler.schedule() == ["b", "text"]
    assert [r.name for r in scheduler.waiting] == ["a", "c"]
    assert [r.name for r in scheduler.skipped_waiting] == ["d"]
    connector.ready.update("acd")
    assert scheduler.schedule(throttle=True) == ["d", "a", "c"]


def test_what_was_held_back_is_there_again_after_an_error() -> None:
    scheduler = wrapped()(Connector())
    scheduler.waiting.append(Request("a"))
    scheduler.fails = True
    with pytest.raises(RuntimeError, match="step"):
        scheduler.schedule()
    assert [r.name for r in scheduler.waiting] == ["a"]


def test_another_connector_under_a_wrapped_scheduler_is_not_asked() -> None:
    scheduler = wrapped()(object())
    scheduler.waiting.append(Request("a"))
    assert scheduler.schedule() == ["a"]
    none = wrapped()(None)
    none.waiting.append(Request("a"))
    assert none.schedule() == ["a"]

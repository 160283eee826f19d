"""Run in vLLM's environment: the level on the vendor's real classes, and the scheduler's side over them."""

import sys
import tempfile
import time
import uuid
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, sys.argv[1])

from eccon_guard.channel import Listener, Speaker, socket_path  # type: ignore[import-not-found]
from eccon_guard.check import MODULE_NAMES, decide, versions  # type: ignore[import-not-found]
from eccon_guard.events import Events  # type: ignore[import-not-found]
from eccon_guard.notes import Board, Note  # type: ignore[import-not-found]
from eccon_guard.scheduling import GuardScheduler  # type: ignore[import-not-found]
from eccon_guard.settings import Settings  # type: ignore[import-not-found]
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_rbln.distributed.ec_transfer.ec_connector import rbln_ec_nixl_connector as vendor
from vllm_rbln.v1.core.optimum_scheduler import RBLNOptimumScheduler


def levels() -> None:
    settings, _ = Settings.read({})
    for scheduler, level in ((Scheduler, "gate"), (AsyncScheduler, "gate"), (RBLNOptimumScheduler, "wrap")):
        for queue in (FCFSRequestQueue, PriorityRequestQueue):
            for role in ("ec_consumer", "ec_producer"):
                verdict = decide(
                    settings, versions(), vendor, ECConnectorBase, scheduler, queue, role=role, workers=1
                )
                assert (verdict.level, verdict.reason) == (level, ""), (scheduler, verdict)


def request(name: str, *hashes: str, status: str = "WAITING") -> Any:
    features = [
        SimpleNamespace(identifier=h, mm_position=SimpleNamespace(offset=10 * i, length=8))
        for i, h in enumerate(hashes)
    ]
    return SimpleNamespace(
        request_id=name,
        status=SimpleNamespace(name=status),
        mm_features=features,
        arrival_time=time.time(),
        ec_transfer_params=None,
        get_num_encoder_embeds=lambda _i: 8,
    )


def step(*running: str, new: tuple[Any, ...] = ()) -> Any:
    tokens = dict.fromkeys(running, 1)
    begun = [SimpleNamespace(req_id=r.request_id, mm_features=r.mm_features) for r in new]
    return SimpleNamespace(
        num_scheduled_tokens=tokens, total_num_scheduled_tokens=len(tokens), scheduled_new_reqs=begun
    )


def make(directory: str, level: str, *, producer: bool = False, **extra: object) -> tuple[Any, Any]:
    settings, _ = Settings.read(extra)
    transfer = SimpleNamespace(is_ec_producer=producer, is_ec_consumer=not producer)
    path = socket_path(directory, uuid.uuid4().hex)
    speaker = Speaker(path)
    config = SimpleNamespace(ec_transfer_config=transfer)
    scheduler = GuardScheduler(
        config, ECConnectorRole.SCHEDULER, settings, Listener(path), Board(), Events("", ""), level
    )
    assert scheduler.take_unavailable_requests() == set()
    speaker.tick()
    return speaker, scheduler


def hooks(directory: str) -> None:
    """A placeholder marks the answer, fails who runs on, and its hash is never used again."""
    speaker, s = make(directory, "hooks")
    ends, runs_on, waits = request("ends", "h1", "h2"), request("runs on", "h2"), request("waits", "h3")
    for r in (ends, runs_on, waits):
        for i in range(len(r.mm_features)):
            s.update_state_after_alloc(r, i)
    meta = s.build_connector_meta(step("ends", "runs on"))
    assert ({m.mm_hash for m in meta.mm_datas_to_load}, meta.gated) == ({"h1", "h2"}, False)
    speaker.say(Note("placeholder", "h2", "it never came", time.time()))
    for _ in range(2):  # vllm-rbln asks twice
        assert s.request_finished(ends) == (False, {"ec_guard": {"h2": "placeholder"}})
    assert s.take_unavailable_requests() == {"runs on"}
    speaker.say(Note("staged", "h2"))
    for computed in (0, 1000):  # in the prefix cache as well: it may be of zeros
        later = request(f"later {computed}", "h2")
        assert not s.ensure_cache_available(later, computed)
        assert s.take_unavailable_requests() == {later.request_id}
    unasked = request("unasked", "h1", "h2")
    s.build_connector_meta(step("unasked", new=(unasked,)))
    assert s.take_unavailable_requests() == {"unasked"}
    assert s.request_finished(unasked) == (False, {"ec_guard": {"h2": "placeholder"}})
    s.build_connector_meta(step("well", new=(request("well", "h1"),)))
    assert s.take_unavailable_requests() == set()


def wanted(directory: str) -> None:
    """As long as a request has not ended its items are wanted, whether it waits or runs."""
    speaker, s = make(directory, "wrap")
    waits, runs = request("waits", "h1", "h2"), request("runs", "h2", "h3")
    for h in ("h1", "h2", "h3"):
        speaker.say(Note("staged", h))
    for r in (waits, runs):
        assert s.ensure_cache_available(r, 0)
    s.update_state_after_alloc(runs, 0)
    assert set(s.build_connector_meta(step("runs")).wanted) == {"h1", "h2", "h3"}
    assert s.build_connector_meta(step("runs")).wanted == ()  # now and then will do
    s.request_finished(waits)
    s._wanted_at = 0.0
    assert set(s.build_connector_meta(step("runs")).wanted) == {"h2", "h3"}
    s.request_finished(runs)
    s._wanted_at = 0.0
    assert s.build_connector_meta(step()).wanted == ()


def ids(directory: str) -> None:
    """An id that comes again is another request: what was answered then is not what is answered now."""
    speaker, s = make(directory, "gate", producer=True)
    first, second = request("r", "h1"), request("r", "h2")
    speaker.say(Note("outcome", "h1", "delivered", time.time()))
    assert s.request_finished(first) == (False, {"ec_guard": {"h1": "delivered"}})
    assert s.request_finished(second) == (False, {"ec_guard": {"h2": "unknown"}})


def never_raises(directory: str) -> None:
    """What a hook is given may be anything in a version that was not tried."""
    _, s = make(directory, "gate")
    for _ in range(2):
        assert s.ensure_cache_available(None, 0) is True
        assert s.update_state_after_alloc(None, 0) is None
        assert s.build_connector_meta(None).mm_datas_to_load == []
        assert s.request_finished(None) == (False, None)
        assert s.take_unavailable_requests() == set()


def retreat() -> None:
    """With a vendor that has changed it can still be loaded, to step down."""
    from vllm.v1.core.sched import request_queue

    kept = {name: getattr(vendor, name) for name in (*MODULE_NAMES, "RblnECNixlConnectorWorker")}
    queue = request_queue.FCFSRequestQueue
    loaded = [name for name in sys.modules if name.startswith("eccon_guard.")]
    modules = {name: sys.modules.pop(name) for name in loaded}
    try:
        for name in kept:
            delattr(vendor, name)
        del request_queue.FCFSRequestQueue
        from eccon_guard.connector import EcconGuardConnector  # type: ignore[import-not-found]

        assert issubclass(EcconGuardConnector, vendor.RblnECNixlConnector)
    finally:
        for name, value in kept.items():
            setattr(vendor, name, value)
        request_queue.FCFSRequestQueue = queue
        sys.modules.update(modules)


def gate(directory: str) -> None:
    """What is missing is waited for; what the prefix cache covers, or runs already, is not."""
    speaker, s = make(directory, "gate", guard_wait_s=0.2)
    r = request("r", "h1", "h2")
    assert not s.ensure_cache_available(r, 0)
    speaker.say(Note("staged", "h2"))
    assert s.ensure_cache_available(r, 8)
    assert not s.ensure_cache_available(r, 0)
    time.sleep(0.25)
    assert not s.ensure_cache_available(r, 0)
    assert s.take_unavailable_requests() == {"r"}
    assert s.take_unavailable_requests() == set()
    assert s.request_finished(r) == (False, None)
    assert s.ensure_cache_available(request("running", "h9", status="RUNNING"), 0)
    assert s.ensure_cache_available(request("text"), 0)


def encoder(directory: str) -> None:
    """Nothing runs while the way is closed; the answer tells of the push of this very request."""
    speaker, s = make(directory, "wrap", producer=True)
    r = request("r", "h1")
    assert not s.ensure_cache_available(r, 0)
    speaker.say(Note("link", text="up"))
    assert s.ensure_cache_available(r, 0)
    assert s.build_connector_meta(step("r", new=(r,))).step_hashes == ["h1"]
    speaker.say(Note("outcome", "h1", "delivered", time.time()))
    for _ in range(2):
        assert s.request_finished(r) == (False, {"ec_guard": {"h1": "delivered"}})
    assert s.request_finished(request("later", "h1")) == (False, {"ec_guard": {"h1": "unknown"}})


if __name__ == "__main__":
    retreat()
    levels()
    with tempfile.TemporaryDirectory(prefix="eccon-guard-") as where:
        hooks(where)
        wanted(where)
        ids(where)
        never_raises(where)
        gate(where)
        encoder(where)
    print("as it should be")

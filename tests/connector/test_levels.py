"""The levels below `gate` in a live engine: `ECCON_LAB=DIR`. vllm-rbln's scheduler over vLLM's CPU runner.

A PD so made is asked the same of as one with vLLM's own scheduler; the encoders have vLLM's.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.connector import test_faults as faults
from tests.connector.guarded import GuardedCluster, GuardedLab, encode
from tests.contract.client import ask, fresh, part, text
from tests.contract.target import Server

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif("ECCON_LAB" not in os.environ, reason="needs a lab: ECCON_LAB=DIR"),
]


class Scheduled(GuardedCluster):
    """Its PD has the scheduler of this name."""

    scheduler = "VendorsScheduler"

    def new_pd(self) -> Server:
        path = f"{Path(__file__).parent}{os.pathsep}{self.lab.environment()['PYTHONPATH']}"
        flags = ("--scheduler-cls", f"vendors_scheduler.{self.scheduler}", "--no-async-scheduling")
        # Its prefix cache is of blocks that the vendor's runner copies.
        more = ("--no-enable-prefix-caching",)
        return self.lab.pd(self.pull_port, *flags, *more, env={"PYTHONPATH": path})


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduled]:
    lab = GuardedLab(tmp_path_factory.mktemp("levels"))
    try:
        yield Scheduled(lab)
    finally:
        lab.close()


FAULTS: list[Callable[[GuardedCluster], None]] = [
    faults.test_an_item_that_nobody_encoded_fails_its_request_alone,
    faults.test_a_request_may_say_how_long_it_waits,
    faults.test_junk_with_valid_framing_on_the_pull_port,
    faults.test_the_same_image_in_every_turn_is_pushed_again,
    faults.test_an_entry_that_was_evicted_or_reused_is_never_another_image,
    faults.test_a_stopped_encoder_stalls_nobody_and_is_used_again,
    faults.test_an_encoder_killed_after_its_item_was_pulled,
    faults.test_an_encoder_killed_before_its_item_was_pulled,
]


def test_the_vendors_scheduler_is_wrapped_and_answers_the_same(started: Scheduled) -> None:
    started.settle()
    started.pd.wait_log("EC guard: level=wrap")
    url, one, other = faults.url(), fresh(), fresh()
    for u in (one, other):
        assert encode(started.first, u, url=url) == "delivered"
    first, second = (
        ask(started.pd, [part(u, url), text()], logprobs=True, top_logprobs=3).answer() for u in (one, other)
    )
    assert first == second


def test_many_wait_and_many_pass(started: Scheduled) -> None:
    """What waits is taken out of the queue and put back at each step: nobody is lost by it."""
    started.settle()

    def one(n: int) -> int:
        u = fresh()
        if n % 3:
            assert encode(started.first, u) == "delivered"
        return ask(started.pd, [part(u), text()] if n % 5 else "hello").status

    with ThreadPoolExecutor(15) as pool:
        statuses = list(pool.map(one, range(30)))
    assert statuses == [200 if n % 3 or n % 5 == 0 else 500 for n in range(30)]
    faults.lives(started.pd)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__.removeprefix("test_"))
def test_wrapped(started: Scheduled, fault: Callable[[GuardedCluster], None]) -> None:
    started.settle()
    fault(started)


def test_hooks_only(started: Scheduled) -> None:
    """A missing item stalls the engine while it is waited for; then its request fails, and no other."""
    started.pd.destroy()
    started.scheduler = "Unwrappable"
    started.settle()
    pd = started.pd
    pd.wait_log("EC guard: level=hooks")
    u = fresh()
    assert encode(started.first, u) == "delivered"
    assert ask(pd, [part(u), text()]).status == 200
    with ThreadPoolExecutor(1) as pool:
        missing = pool.submit(ask, pd, [part(fresh()), text()])
        faults.lost(missing.result(), started.lab.wait_s + 5)
    # One that ends in the very step is over before it can fail: its answer says that it is void.
    name = fresh()
    reply = ask(pd, [part(name), text()], max_tokens=1)
    assert reply.status == 200
    assert reply.json()["ec_transfer_params"] == {"ec_guard": {name: "placeholder"}}
    # That name may stand for zeros in a prefix cache, whatever comes under it.
    assert encode(started.first, name) == "delivered"
    assert ask(pd, [part(name), text()]).status == 500
    faults.lives(pd)

"""Who gets the next item, and who waits for room: the rules alone, without sockets to encoders."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from eccon_proxy.admission import Room
from eccon_proxy.encoders import Encoder, Staged
from eccon_proxy.group import Group
from eccon_proxy.settings import from_mapping

PD = "http://127.0.0.1:9"


def group_of(count: int, **settings: Any) -> Group:
    """A group of open encoders."""
    group = Group(from_mapping({"decode_servers_urls": [PD], **settings}))
    for i in range(count):
        encoder = Encoder(f"e{i}", f"http://127.0.0.1:{10 + i}", group, group.settings, lambda _: None)
        group.add(encoder)
        encoder.answered()
    return group


async def take(group: Group, exclude: Sequence[str] = (), weight: float = 1.0, key: bytes = b"") -> Encoder:
    """One slot, now."""
    encoder = await group.acquire(set(exclude), weight, 0.01, key)
    assert encoder is not None
    return encoder


async def test_round_robin_goes_on_over_requests_and_skips_who_is_out() -> None:
    group = group_of(3)
    assert [(await take(group)).id for _ in range(4)] == ["e0", "e1", "e2", "e0"]
    group.members[1].silent("gone")
    assert [(await take(group)).id for _ in range(3)] == ["e2", "e0", "e2"]


async def test_a_second_try_does_not_move_the_turn() -> None:
    group = group_of(3)
    assert (await take(group)).id == "e0"
    assert (await take(group, ["e0"])).id == "e1"
    assert (await take(group)).id == "e1"


async def test_least_inflight_and_least_work() -> None:
    group = group_of(3, policy="least_inflight")
    busy = [await take(group) for _ in range(5)]
    group.release(busy[1], 1.0)
    group.release(busy[4], 1.0)
    assert (await take(group)).id == "e1"
    group = group_of(2, policy="least_work")
    assert [(await take(group, weight=w)).id for w in (9.0, 1.0, 1.0, 5.0, 5.0)] == [
        "e0", "e1", "e1", "e1", "e1",
    ]  # fmt: skip


async def test_affinity_keeps_content_and_bounds_the_load() -> None:
    group = group_of(4, policy="affinity", identity="content", unsafe_identity=True)
    homes: Counter[str] = Counter()
    for i in range(64):
        key = b"content-%d" % i
        first = await take(group, key=key)
        group.release(first, 1.0)
        again = await take(group, key=key)
        group.release(again, 1.0)
        assert first is again
        homes[first.id] += 1
    assert len(homes) == 4
    held = [await take(group, key=b"the same") for _ in range(12)]
    assert max(Counter(e.id for e in held).values()) <= 5


async def test_the_limit_makes_items_wait_in_order() -> None:
    group = group_of(1, encoder_concurrency=1)
    held = await take(group)
    order: list[int] = []

    async def one(number: int) -> None:
        encoder = await group.acquire(set(), 1.0, 5.0)
        assert encoder is held
        order.append(number)
        group.release(encoder, 1.0)

    tasks = [asyncio.ensure_future(one(i)) for i in range(3)]
    await asyncio.sleep(0)
    assert group.waiting == 3
    tasks[1].cancel()
    await asyncio.sleep(0)
    group.release(held, 1.0)
    await asyncio.wait(tasks)
    assert order == [0, 2]
    assert (held.taken, group.waiting) == (0, 0)
    await take(group)
    with pytest.raises(asyncio.TimeoutError):
        await group.acquire(set(), 1.0, 0.01)


async def test_who_waits_is_told_when_nobody_is_left() -> None:
    group = group_of(1, encoder_concurrency=1)
    held = await take(group)
    waiting = asyncio.ensure_future(group.acquire(set(), 1.0, 5.0))
    await asyncio.sleep(0)
    held.silent("gone")
    group.changed()
    assert await waiting is None
    assert await group.acquire(set(), 1.0, 5.0) is None


async def test_staged_items_count_and_orphans_go_with_the_next_step() -> None:
    group = group_of(1, staged_items=2)
    (encoder,) = group.members
    now = asyncio.get_running_loop().time()
    for uuid in (b"a", b"b"):
        encoder.staged[uuid] = Staged(encoder, uuid, now)
    assert not encoder.has_room()
    waiting = asyncio.ensure_future(group.acquire(set(), 1.0, 5.0))
    await asyncio.sleep(0)
    encoder.consumed(encoder.staged[b"a"])
    assert await waiting is encoder
    encoder.orphan(encoder.staged[b"b"])
    assert encoder.held() == 1
    group.flushed_at = now
    assert encoder.held() == 0


async def test_failures_eject_longer_each_time_and_a_trial_ends_it() -> None:
    group = group_of(1, eject_after=2, eject_seconds=10)
    (encoder,) = group.members
    staged = Staged(encoder, b"a", 0.0)
    assert not encoder.failed("x", 100.0)
    assert encoder.failed("x", 100.0)
    assert encoder.state == "ejected"
    assert not staged.usable(0.0)
    assert not encoder.trial_due(109.0)
    assert encoder.trial_due(110.0)
    encoder.failed("again", 110.0)
    assert not encoder.trial_due(129.0)
    assert encoder.trial_due(130.0)
    encoder.returned()
    assert (encoder.state, encoder.failures) == ("ready", 0)


async def test_room_is_given_in_order_and_comes_back() -> None:
    room = Room(4)
    await room.take(3, 1.0)
    large = asyncio.ensure_future(room.take(3, 5.0))
    await asyncio.sleep(0)
    assert not room.take_now(1), "nobody overtakes"
    small = asyncio.ensure_future(room.take(1, 5.0))
    await asyncio.sleep(0)
    large.cancel()
    await small
    assert (room.taken, room.waiting) == (4, 0)
    with pytest.raises(asyncio.TimeoutError):
        await room.take(1, 0.01)
    room.give(3)
    room.give(1)
    assert room.taken == 0


async def test_a_room_whose_place_is_given_in_the_turn_of_a_cancellation() -> None:
    room = Room(1)
    await room.take(1, 1.0)
    waiting = asyncio.ensure_future(room.take(1, 5.0))
    await asyncio.sleep(0)
    room.give()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert room.taken == 0


async def test_all_in_the_queue_can_be_sent_away() -> None:
    room = Room(1)
    await room.take(1, 1.0)
    waiting = asyncio.ensure_future(room.take(1, 5.0))
    await asyncio.sleep(0)
    room.fail(RuntimeError("the PD went down"))
    with pytest.raises(RuntimeError):
        await waiting
    assert (room.taken, room.waiting) == (1, 0)

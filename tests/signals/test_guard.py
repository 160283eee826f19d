"""What a guarded connector tells, from its own sender to the daemon's socket."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from eccon.connector.eccon_guard.events import Events
from eccon.signals.connector import ItemEvent
from eccon.signals.guard import Event, Gaps, item, level, parse
from eccon.supervisor.guardfeed import GuardFeed


def event(number: int, sender: str = "s", **more: object) -> Event:
    raw = {"v": 1, "who": "pd", "s": sender, "n": number, "t": 1_700_000_000_000_001, "k": "meta", **more}
    found = parse(json.dumps(raw).encode())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("kind", "text", "step"),
    [
        ("push", "", "pushed"),
        ("meta", "", "received"),
        ("pull_start", "", "initiated"),
        ("pull_done", "", "complete"),
        ("ack", "delivered", "acked"),
        ("ack", "ok", None),
        ("load", "", None),
        ("new in a later version", "", None),
    ],
)
def test_steps(kind: str, text: str, step: str | None) -> None:
    found = item(event(1, k=kind, x=text, h="hash"))
    assert found == (None if step is None else ItemEvent(step, 1_700_000_000.000001, "hash"))  # type: ignore[arg-type]


@pytest.mark.parametrize("raw", [b"", b"{}", b"junk", b"\xff\xfe", b"[" * 3000, b'{"who":1}'])
def test_what_is_no_event_is_passed_over(raw: bytes) -> None:
    assert parse(raw) is None


def test_gaps_are_counted_by_sender() -> None:
    gaps = Gaps()
    assert [gaps.take(event(n)) for n in (5, 6, 9, 9, 10)] == [0, 0, 2, 0, 0]
    assert [gaps.take(event(n, "other")) for n in (100, 102)] == [0, 1]
    assert gaps.lost == 3


def test_the_level_in_a_log() -> None:
    line = b"(EngineCore pid=1) 1.5 INFO 1 MainThread x:1 EC guard: level=%b role=ec_consumer: text\n"
    assert level(b"nothing\n") is None
    assert level(line % b"wrap") == "wrap"
    assert level(line % b"wrap" + line % b"vendor") == "vendor"
    assert level(line % b"unheard-of") is None
    vendors = b"(Worker pid=1) 1.5 INFO 1 MainThread x:1 RblnECNixlConnector created (role=WORKER)\n"
    assert level(vendors) == "off"
    assert level(vendors + line % b"vendor") == "vendor"


@pytest_asyncio.fixture
async def path() -> AsyncIterator[Path]:
    yield Path(f"/tmp/eccon-feed-{uuid.uuid4().hex[:8]}.sock")


async def test_from_sender_to_daemon(path: Path) -> None:
    got: list[Event] = []
    lost: list[int] = []
    path.touch()  # left by a daemon that was killed
    feed = GuardFeed(path, got.append, lost.append)
    assert path.stat().st_mode & 0o777 == 0o600
    sender = Events(str(path), "encoder-3", "wrap")
    for n in range(20):
        sender.tell("push", f"h{n}", peer="tcp://x", nbytes=n)
        while len(got) <= n:  # some systems keep ten of them
            await asyncio.sleep(0.001)
    assert [(e.who, e.level, e.number, e.mm_hash, e.nbytes) for e in got] == [
        ("encoder-3", "wrap", n + 1, f"h{n}", n) for n in range(20)
    ]
    for n in range(5000):  # more than the socket holds
        sender.tell("push", str(n))
    told = 5020
    while got[-1].mm_hash != "last":
        sender.tell("push", "last")  # it may find no room either
        told += 1
        await asyncio.sleep(0.005)
    assert feed.lost == got[-1].number - len(got)
    assert feed.lost > 0
    assert got[-1].number <= told
    feed.close()
    assert not path.exists()
    sender.tell("push", "nobody listens")
    sender.close()

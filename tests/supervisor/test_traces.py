"""Deliveries find their request by the item's name, also when one name goes through many requests."""

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

from eccon.model import ClusterInfo, Span, Trace
from eccon.signals.transfers import Delivery
from eccon.supervisor.board import Board
from eccon.supervisor.traces import Traces


@pytest_asyncio.fixture
async def board() -> AsyncIterator[Board]:
    yield Board(ClusterInfo(name="t"))
    await asyncio.sleep(0)


def request(name: str, began: float, *, status: int = 0) -> Trace:
    encode = Span(kind="encode", start=0.0, end=0.1, item=0, attempt=1, encoder="encoder-0", uuid="kept")
    return Trace(id=name, started_at=began, status=status, spans=(encode,))


def delivery(at: float) -> Delivery:
    return Delivery("kept", "encoder-0", at, at + 0.1, at + 0.1, at + 0.2)


def transfers(board: Board) -> dict[str, int]:
    return {t.id: sum(s.kind == "pull" for s in t.spans) for t in board.snapshot().traces}


async def test_a_kept_name_belongs_to_the_request_of_its_day(board: Board) -> None:
    traces = Traces(board)
    traces.take(request("a", 100.0))
    traces.deliver(delivery(100.0))
    traces.take(request("a", 100.0, status=200))
    traces.deliver(delivery(200.0))  # the proxy has yet to tell of the request that it is of
    assert transfers(board) == {"a": 1}
    traces.take(request("b", 200.0))
    assert transfers(board) == {"a": 1, "b": 1}
    traces.take(request("b", 200.0, status=200))
    traces.take(request("a", 100.0, status=200))  # told anew: its day is past
    traces.take(request("c", 300.0))
    traces.deliver(delivery(300.0))
    assert transfers(board) == {"a": 1, "b": 1, "c": 1}

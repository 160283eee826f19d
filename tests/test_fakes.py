"""The fakes themselves: what they record and how they break, before anything is tested against them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.fakes import CHAT, Exchange, Fake, hang, reset, shut


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[tuple[Fake, aiohttp.ClientSession]]:
    """A fake and a client of it."""
    fake = Fake("fake")
    await fake.start()
    async with aiohttp.ClientSession(fake.url) as session:
        yield fake, session
    await fake.stop()
    assert not fake.errors


async def test_it_records_what_came() -> None:
    async def fine(exchange: Exchange) -> None:
        await exchange.json(200, {"ok": True})

    async with running() as (fake, session):
        fake.always(fine)
        for n in range(2):
            async with session.post(CHAT + "?q=1", data=b'{"a":1}', headers={"x-a": str(n)}) as answer:
                assert await answer.json() == {"ok": True}
        one, two = fake.requests()
        assert (one.path, one.body, one.header("x-a"), one.json()) == (
            CHAT + "?q=1",
            b'{"a":1}',
            "0",
            {"a": 1},
        )
        assert one.connection == two.connection
        assert one.done_at
        assert one.closed_at is None


@pytest.mark.parametrize("chunks", [[b"abc"], [b"a", b"", b"bc"], [b"x" * 100_000] * 5])
async def test_chunked_bodies(chunks: list[bytes]) -> None:
    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def echo(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.chunk(exchange.seen.body)
        await exchange.finish()

    async with running() as (fake, session):
        fake.always(echo)
        async with session.post(CHAT, data=body()) as answer:
            assert await answer.read() == b"".join(chunks)


@pytest.mark.parametrize("how", [reset, shut])
async def test_it_breaks_connections(how: object) -> None:
    async with running() as (fake, session):
        fake.always(reset if how is reset else shut)
        with pytest.raises(aiohttp.ClientError):
            await session.post(CHAT, data=b"x")


async def test_half_an_answer() -> None:
    async def half(exchange: Exchange) -> None:
        await exchange.start(200, length=10)
        await exchange.send(b"123")
        exchange.close()

    async with running() as (fake, session):
        fake.then(half)
        async with session.post(CHAT, data=b"x") as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()


async def test_it_sees_the_peer_leave() -> None:
    async with running() as (fake, session):
        fake.always(hang)
        with pytest.raises(asyncio.TimeoutError):
            await session.post(CHAT, data=b"x", timeout=aiohttp.ClientTimeout(total=0.1))
        (seen,) = fake.requests()
        while seen.closed_at is None:
            await asyncio.sleep(0)
        assert fake.busy == 0 or seen.closed_at


async def test_it_is_killed_and_comes_back_on_its_port() -> None:
    async with running() as (fake, session):
        fake.always(hang)
        asked = asyncio.ensure_future(session.post(CHAT, data=b"x"))
        while not fake.requests():
            await asyncio.sleep(0)
        port = fake.port
        await fake.stop(abort=True)
        with pytest.raises(aiohttp.ClientError):
            await asked
        with pytest.raises(aiohttp.ClientError):
            await session.get("/x")
        await fake.start()
        assert fake.port == port
        async with session.get("/x") as answer:
            assert answer.status == 404


async def test_it_holds_back_with_its_peer() -> None:
    sent = 0

    async def flood(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.start()
        while True:
            await exchange.chunk(bytes(65536))
            sent += 65536

    async with running() as (fake, session):
        fake.always(flood)
        async with session.post(CHAT, data=b"x") as answer:
            await answer.content.readexactly(10)
            quiet = at = 0
            while quiet < 20:
                await asyncio.sleep(0.01)
                quiet, at = (quiet + 1, at) if sent == at else (0, sent)
            assert 0 < sent < 50_000_000
            answer.close()

"""Requests with images through a cluster's proxy."""

import asyncio
import itertools

import aiohttp

from eccon import prompt
from tests.supervisor.conftest import Site, until

IMAGES = [str(p) for p in prompt.samples()]


def body(images: int, *, first: int = 0) -> bytes:
    """A request with some of the samples."""
    chosen = [IMAGES[(first + i) % len(IMAGES)] for i in range(images)]
    return prompt.build("m", "What is there?", chosen, stream=False, max_tokens=4)


class Load:
    """Requests with images, one after the other, until stopped."""

    def __init__(self, site: Site) -> None:
        self.url = f"http://127.0.0.1:{site.base}/v1/chat/completions"
        self.answers: list[tuple[int, str]] = []
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        headers = {"content-type": "application/json"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for n in itertools.count():
                async with session.post(self.url, data=body(2, first=n)) as response:
                    self.answers.append((response.status, (await response.text())[:300]))

    async def some_more(self, count: int = 3) -> None:
        """Until that many more were answered."""
        wanted = len(self.answers) + count
        await until(lambda: len(self.answers) >= wanted or self.task.done(), 20, "more answers")

    async def end(self) -> None:
        """Stops, and every answer so far must have been good."""
        self.task.cancel()
        await asyncio.wait({self.task})
        assert [a for a in self.answers if a[0] != 200] == []

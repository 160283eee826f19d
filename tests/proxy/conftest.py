"""Clusters of fakes behind a real proxy process, shared by the cases of a module where they can be."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from tests.proxy.support import Cluster, Proxy, start_cluster

# One event loop for all: the fakes of a module outlive its single cases.
LOOP = pytest.mark.asyncio(loop_scope="session")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the async cases of this directory in one loop."""
    for item in items:
        if item.path.is_relative_to(HERE) and "asyncio" in item.keywords:
            item.add_marker(LOOP, append=False)


def pytest_sessionfinish() -> None:
    """Leave no proxy behind, whatever failed."""
    for proxy in Proxy.started:
        if proxy.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(proxy.process.pid, signal.SIGKILL)


class Clusters:
    """Starts clusters on demand. Those with the same flags are the same one, until a case spoils it."""

    def __init__(self, tmp: Path) -> None:
        self._tmp = tmp
        self._kept: dict[tuple[object, ...], Cluster] = {}
        self._used: list[Cluster] = []
        self._own: list[Cluster] = []

    async def get(self, *flags: str, encoders: int = 2) -> Cluster:
        """A cluster that this case shares with others of its module: leave it as you found it."""
        key = (encoders, flags)
        cluster = self._kept.get(key)
        if cluster is not None:
            try:
                await cluster.begin()
            except AssertionError:
                await self._kept.pop(key).end()
                cluster = None
        if cluster is None:
            cluster = self._kept[key] = await start_cluster(self._tmp, flags, encoders=encoders)
        self._used.append(cluster)
        return cluster

    async def fresh(
        self,
        *flags: str,
        encoders: int = 2,
        pds: int = 1,
        up: bool = True,
        env: dict[str, str] | None = None,
        under: Sequence[str] = (),
    ) -> Cluster:
        """A cluster of this case alone, whose members it may kill."""
        cluster = await start_cluster(
            self._tmp, flags, encoders=encoders, pds=pds, up=up, env=env, under=under
        )
        self._own.append(cluster)
        return cluster

    async def settle(self) -> None:
        """Check what the case used, and end what it leaves unfit for others."""
        problems = []
        for cluster in (*self._used, *self._own):
            try:
                await cluster.check()
            except AssertionError as error:
                problems.append(error)
                self._own.append(cluster)
        for cluster in self._own:
            self._kept = {key: kept for key, kept in self._kept.items() if kept is not cluster}
            await cluster.end()
        self._used.clear()
        self._own.clear()
        if problems:
            raise problems[0]

    async def end(self) -> None:
        """Stop what is kept."""
        for cluster in self._kept.values():
            await cluster.end()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def kept(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clusters]:
    """The clusters of one module."""
    clusters = Clusters(tmp_path_factory.mktemp("p"))
    yield clusters
    await clusters.end()


@pytest_asyncio.fixture(loop_scope="session")
async def clusters(kept: Clusters) -> AsyncIterator[Clusters]:
    """Start clusters; at the end of the case each must be idle, without leaks and tracebacks."""
    yield kept
    await kept.settle()


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(clusters: Clusters) -> Cluster:
    """Two encoders, one PD, default settings."""
    return await clusters.get()

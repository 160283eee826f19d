"""Clusters for the tests of the whole product."""

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, cluster


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    """A ready cluster of one PD, four encoders and the proxy, shared by a module."""
    with cluster() as c:
        c.eccon("up")
        yield c


@pytest.fixture
def fresh() -> Iterator[Cluster]:
    """A cluster of two encoders that is not started yet."""
    with cluster(encoders=2) as c:
        yield c

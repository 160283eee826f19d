"""What fits into the files that a process may have open."""

import pytest

from eccon_proxy.descriptors import fitted
from eccon_proxy.settings import Settings, from_mapping


def settings(encoders: int = 2, **more: object) -> Settings:
    """Settings with so many encoders."""
    urls = [f"http://127.0.0.1:{100 + n}" for n in range(encoders)]
    return from_mapping({"decode_servers_urls": ["http://127.0.0.1:99"], "encode_servers_urls": urls, **more})


@pytest.mark.parametrize("encoders", [0, 2, 8, 64, 256])
@pytest.mark.parametrize("limit", [256, 1024, 4096, 20_000])
def test_clients_and_their_requests_fit(encoders: int, limit: int) -> None:
    found = fitted(settings(encoders), limit)
    assert found.max_inflight < found.max_connections
    assert found.max_inflight + found.max_connections <= limit * 7 // 8
    assert found.max_inflight >= limit // 16


def test_what_fits_stays_as_it_is() -> None:
    wanted = settings(8, max_inflight=100, max_connections=500)
    assert fitted(wanted, 1024) == wanted
    assert fitted(settings(8), 2**20) == settings(8)

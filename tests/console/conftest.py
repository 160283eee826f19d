"""A fixed clock and time zone for what is drawn, and no files of the user."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console import states
from tests.console.fake_daemon import FakeDaemon, running


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    for name in ("NO_COLOR", "ECCON_ASCII", "ECCON_LOW_BANDWIDTH", "LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def utc() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    """A daemon with one encoder that hangs, one that loads, one that died."""
    with running(states.degraded()) as fake:
        yield fake

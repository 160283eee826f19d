"""What a console can be opened on: a daemon, a proxy that runs alone, a recording."""

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from eccon.model import Change, ClusterState

__all__ = ["Problem", "Sink", "Source"]


class Problem(Exception):  # noqa: N818  said to the user, whatever its cause
    """A request failed, or is not possible here; the message is for the user."""


class Sink(Protocol):
    """What takes the state."""

    def take(self, item: ClusterState | Change) -> None:
        """A snapshot or a change."""

    def connection(self, lost: str) -> None:
        """ "" when the other end answers, else why it does not."""


OF_RECORDINGS = frozenset({"faster", "slower", "hold"})
"""Actions that only a recording knows."""


class Source(Protocol):
    """Where state comes from and requests go. All failures of requests are `Problem`."""

    @property
    def flag(self) -> str:
        """What the header says of it; empty for a daemon."""

    def now(self) -> float:
        """The Unix time that the state is of."""

    @property
    def lacks(self) -> frozenset[str]:
        """Names of actions that mean nothing here: help, footer and palette leave them out."""

    async def watch(self, sink: Sink) -> None:
        """Feeds `sink` for as long as the console lives."""

    async def do(self, action: str, name: str = "") -> str:
        """Carries out an action of the table; what was done, for the user."""

    async def read_log(self, name: str, lines: int, take: Callable[[list[str]], None], grep: str = "") -> str:
        """Feeds `take` with lines of a log as it grows, those with `grep`; returns why it ended."""

    def prompt(self, body: bytes, request_id: str) -> AsyncIterator[bytes]:
        """The answer to a chat request, as it comes."""

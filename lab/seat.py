"""A server's place in the lab, kept from one fault to the next: starting vLLM is what takes the time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.contract.target import Server, Target

__all__ = ["Seat"]


@dataclass(frozen=True)
class _Given:
    extra: dict[str, Any]
    flags: tuple[str, ...]
    model: str | None


class Seat:
    """Holds one server, at the same port in every life; it is started anew only where it must be."""

    def __init__(self, target: Target, name: str, role: str) -> None:
        self._launch = target.launch
        self._name = name
        self._role = role
        self._started_with: _Given | None = None
        self._server: Server | None = None

    @property
    def server(self) -> Server:
        """Who sits there."""
        assert self._server is not None
        return self._server

    def take(
        self,
        extra: dict[str, Any],
        flags: tuple[str, ...],
        model: str | None = None,
        *,
        lives: Callable[[Server], bool],
    ) -> None:
        """Somebody who was started with this, and lives. Does not wait for who is new."""
        given = _Given(extra, flags, model)
        if self._server is None or self._started_with != given or not lives(self._server):
            self._start(given)

    def restart(self) -> None:
        """A new life of the same."""
        assert self._started_with is not None
        self._start(self._started_with)

    def _start(self, given: _Given) -> None:
        port = None if self._server is None else self._server.port
        self.leave()
        self._server = self._launch(
            self._name, self._role, given.extra, *given.flags, port=port, model=given.model
        )
        self._started_with = given

    def leave(self) -> None:
        """Nobody."""
        if self._server is not None:
            self._server.destroy()
            self._server = None

"""What of a cluster a later daemon must know, beyond the lives themselves: taken down, and recalled."""

from collections.abc import Iterable

from eccon.model import State
from eccon.supervisor.owner import Owner
from eccon.supervisor.store import Remembered

__all__ = ["recall", "remembered"]


def remembered(owners: Iterable[Owner]) -> dict[str, Remembered]:
    """Of each process, by name."""
    return {
        o.name: Remembered(
            wanted=o.wanted,
            restarts=o.restarts,
            deaths=o.backoff.deaths,
            aside=o.aside,
            failed=o.failed,
            life=o.life.id if o.life else "",
            ready_at=o.ready_at,
        )
        for o in owners
    }


def recall(owner: Owner, known: Remembered) -> None:
    """Into an owner whose task has not begun. What was ready in the life that it has counts as ready on."""
    life, board = owner.life, owner.context.board
    owner.aside, owner.wanted, owner.failed = known.aside, known.wanted, known.failed
    owner.restarts, owner.backoff.deaths = known.restarts, known.deaths
    owner.lived = owner.lived or known.restarts > 0
    if life is not None and not life.died:
        owner.ready_at = known.ready_at if known.life == life.id else None
        state = State.LOADING if owner.ready_at is None else State.READY
        board.update(owner.name, state=state, reason="", pid=life.pid, started_at=life.started_at)
    board.update(owner.name, restarts=owner.restarts)
    owner.describe()

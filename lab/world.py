"""A PD, two encoders and a front on the lab, in which one fault after another is tried and counted."""

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from threading import Event, Lock
from typing import Any

from lab.fronts import PATIENCE_S, Asked, Front
from lab.seat import Seat
from tests.contract.client import ask, fresh, image, part, png, text
from tests.contract.target import Server, Target, free_port, until

__all__ = ["Outcome", "Room", "World", "picture"]

DEATH_S = 10.0
"""A PD that will die of what happened does so within this."""
BETWEEN_S = 0.5
"""Between two requests of somebody else."""
TELLING: dict[str, Any] = {"max_tokens": 12, "logprobs": True, "top_logprobs": 3}
"""Makes answers comparable: equal only for equal prompts and equal images."""


@dataclass(frozen=True)
class Room:
    """How much the connector is given on PD and encoders, and what eccon-proxy is told of it."""

    pd: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    detour: str = ""
    """What encoders have behind the model's path: another name of the same directory."""
    encoder_serve: tuple[str, ...] = ()
    """Flags of `vllm serve` that encoders get beside the usual ones."""
    pds: int = 1
    """How many; encoders push to them in turn."""


@dataclass
class Outcome:
    """Of one fault behind one front."""

    answered: int = 0
    """Right answers, or any where there is nothing to compare with."""
    wrong: int = 0
    """Answers with 200 that speak of another image."""
    refused: int = 0
    """Answers 400 to 499, and 503 that say when to come again: the client is told, and nothing was begun."""
    failed: int = 0
    """Answers from 500 on, and none at all."""
    pd_died: bool = False
    innocent_s: float = 0.0
    """Longest that somebody else's request of text only took."""
    innocent_failed: bool = False
    waited_s: float = 0.0
    """Longest that a request took that was not answered."""
    told: str = ""
    """What the last of those heard, if anything."""
    encoder_s: float = 0.0
    """Longest that an encoder's own request of text only took, where that was tried."""
    load: float | None = None
    """Of the machine: processes that wanted a core, averaged over the last minute. None: not noted."""


def picture(width: int = 224, height: int = 224) -> str:
    """A picture like no other, as a data URL."""
    return image(png(width, height))


class World:
    """One front's cluster. Whatever a fault breaks is mended before the next."""

    def __init__(self, target: Target, front: Front) -> None:
        self.target = target
        self.front = front
        self.outcome = Outcome()
        self._counting = Lock()
        self._room = Room()
        self._pull_ports = [free_port(), free_port()]
        self._pd_seats = [Seat(target, "pd", "ec_consumer") for _ in self._pull_ports]
        self._encoder_seats = [Seat(target, "encoder", "ec_producer") for _ in range(2)]

    @property
    def pds(self) -> list[Server]:
        """Those of the room."""
        return [seat.server for seat in self._pd_seats[: self._room.pds]]

    @property
    def pd(self) -> Server:
        """The PD of now; of several the first."""
        return self._pd_seats[0].server

    @property
    def pull_port(self) -> int:
        """Of the PD's connector."""
        return self._pull_ports[0]

    @property
    def encoders(self) -> list[Server]:
        """Both."""
        return [seat.server for seat in self._encoder_seats]

    def prepare(self, room: Room) -> None:
        """Everybody alive, with that much room, and nothing counted yet. Only who must is started anew."""
        self.outcome = Outcome()
        self._room = room
        for seat, pull in zip(self._pd_seats, self._pull_ports, strict=True):
            if pull in self._pull_ports[: room.pds]:
                seat.take({"pull_host": "127.0.0.1", "pull_port": pull} | room.pd, (), lives=_lives)
            else:
                seat.leave()
        for i, seat in enumerate(self._encoder_seats):
            where = {"llm_host": "127.0.0.1", "llm_pull_port": self._pull_ports[i % room.pds]}
            extra = where | {"producer_cache_ttl_s": 600} | room.encoder
            model = self.target.model + room.detour
            seat.take(extra, room.encoder_serve, model, lives=Server.alive)
        for server in (*self.pds, *self.encoders):
            server.wait_ready()
        for i, encoder in enumerate(self.encoders):
            self._link(encoder, self.pds[i % room.pds])
        for pd in self.pds:
            assert ask(pd, "flush", max_tokens=1).status == 200
        self.front.start(self.pds, self.encoders, list(room.flags))
        until(self.front.settled, 60, "the front is not ready")

    def _link(self, encoder: Server, pd: Server) -> None:
        """Until what it pushes arrives: its socket finds a new PD in its own time."""
        u = fresh()
        assert ask(encoder, [part(u)], max_tokens=1).status == 200
        pd.wait_event(f"received metadata for mm_hash={u}")

    def restart_pd(self) -> None:
        """A new life of the PD at the same addresses; the front stays."""
        self._pd_seats[0].restart()
        self.pd.wait_ready()
        until(self.front.settled, 60, "the front does not find the new PD")

    def truth(self, url: str) -> object:
        """What the PD says of a picture that came to it the right way, whatever the front does."""
        u = fresh()
        assert ask(self.encoders[1], [part(u, url)], max_tokens=1).status == 200
        return ask(self.pd, [part(u, url), text()], cache_salt=fresh(), **TELLING).answer()

    def ask(self, content: object, *, expected: object = None, **more: Any) -> Asked:
        """Through the front, and counted."""
        asked = self.front.ask(content, **({"cache_salt": fresh()} | TELLING | more))
        with self._counting:
            self._count(asked, expected)
        return asked

    def _count(self, asked: Asked, expected: object) -> None:
        o = self.outcome
        if asked.status == 200 and expected is not None and asked.answer() != expected:
            o.wrong += 1
        elif asked.status == 200:
            o.answered += 1
        elif 400 <= asked.status < 500 or asked.told_when:
            o.refused += 1
        else:
            o.failed += 1
        if asked.status != 200:
            o.waited_s = max(o.waited_s, asked.seconds)
            o.told = "" if asked.reply is None else f"{asked.status} {asked.reply.body.decode()[:300]}"

    def beside(self, act: Callable[[], object], after: Event | None = None) -> None:
        """Does something, and meanwhile sends somebody else's text again and again.

        Args:
            after: begins with that only then; a text makes the PD take in what was pushed to it.
        """
        with ThreadPoolExecutor(1) as pool:
            doing = pool.submit(act)
            if after is not None:
                after.wait(PATIENCE_S)
            while not doing.done():
                self.innocent()
                time.sleep(BETWEEN_S)
            doing.result()

    def innocent(self) -> None:
        """Somebody else's request of text only, timed."""
        asked = self.front.ask("Hello", max_tokens=1)
        self.outcome.innocent_s = max(self.outcome.innocent_s, asked.seconds)
        self.outcome.innocent_failed |= asked.status != 200

    def encoder_answers(self, encoder: Server) -> None:
        """A text of its own for an encoder, timed: it takes 0.02 s as long as its engine moves."""
        began = time.monotonic()
        with contextlib.suppress(HTTPException, OSError):
            ask(encoder, "Hello", timeout=PATIENCE_S, max_tokens=1)
        with self._counting:
            self.outcome.encoder_s = max(self.outcome.encoder_s, time.monotonic() - began)

    def conclude(self) -> Outcome:
        """Waits for what may still come: the PD's death shows at its next step."""
        self.innocent()
        deadline = time.monotonic() + DEATH_S
        troubled = self.outcome.failed > 0 or self.outcome.innocent_failed
        while troubled and all(pd.alive() for pd in self.pds) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.outcome.pd_died = not all(map(_lives, self.pds))
        self.outcome.load = os.getloadavg()[0]
        return self.outcome

    def close(self) -> None:
        """Ends everybody."""
        self.front.stop()
        for seat in (*self._pd_seats, *self._encoder_seats):
            seat.leave()


def _lives(pd: Server) -> bool:
    try:
        return pd.alive() and ask(pd, "flush", max_tokens=1).status == 200
    except (HTTPException, OSError):
        return False

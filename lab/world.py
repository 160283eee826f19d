"""A PD, two encoders and a front on the lab, in which one fault after another is tried and counted."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from threading import Event, Lock
from typing import Any

from lab.fronts import PATIENCE_S, Asked, Front
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


@dataclass
class Outcome:
    """Of one fault behind one front."""

    answered: int = 0
    """Right answers, or any where there is nothing to compare with."""
    wrong: int = 0
    """Answers with 200 that speak of another image."""
    refused: int = 0
    """Answers 400 to 499: the client is told."""
    failed: int = 0
    """Answers from 500 on, and none at all."""
    pd_died: bool = False
    innocent_s: float = 0.0
    """Longest that somebody else's request of text only took."""
    innocent_failed: bool = False
    waited_s: float = 0.0
    """Longest that a request took that was not answered."""


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
        self._pull_port = free_port()
        self._pd: Server | None = None
        self._encoders: list[Server | None] = [None, None]

    @property
    def pd(self) -> Server:
        """The PD of now."""
        assert self._pd is not None
        return self._pd

    @property
    def encoders(self) -> list[Server]:
        """Both."""
        return [e for e in self._encoders if e is not None]

    def prepare(self, room: Room) -> None:
        """Everybody alive, with that much room, and nothing counted yet. Only who must is started anew."""
        self.outcome = Outcome()
        before, self._room = self._room, room
        if self._pd is None or room.pd != before.pd or not self._pd_lives():
            self._start_pd()
        for i, encoder in enumerate(self._encoders):
            same = (room.encoder, room.detour) == (before.encoder, before.detour)
            if encoder is None or not same or not encoder.alive():
                if encoder is not None:
                    encoder.destroy()
                self._encoders[i] = self._start_encoder()
        self.pd.wait_ready()
        for encoder in self.encoders:
            encoder.wait_ready()
            self._link(encoder)
        assert ask(self.pd, "flush", max_tokens=1).status == 200
        self.front.start(self.pd, self.encoders, list(room.flags))
        until(self.front.settled, 60, "the front is not ready")

    def _start_pd(self) -> None:
        """Where it was before, if it was."""
        port = None if self._pd is None else self._pd.port
        if self._pd is not None:
            self._pd.destroy()
        extra = {"pull_host": "127.0.0.1", "pull_port": self._pull_port} | self._room.pd
        self._pd = self.target.launch("pd", "ec_consumer", extra, port=port)

    def _start_encoder(self) -> Server:
        where = {"llm_host": "127.0.0.1", "llm_pull_port": self._pull_port, "producer_cache_ttl_s": 600}
        model = self.target.model + self._room.detour
        return self.target.launch("encoder", "ec_producer", where | self._room.encoder, model=model)

    def _link(self, encoder: Server) -> None:
        """Until what it pushes arrives: its socket finds a new PD in its own time."""
        u = fresh()
        assert ask(encoder, [part(u)], max_tokens=1).status == 200
        self.pd.wait_event(f"received metadata for mm_hash={u}")

    def restart_pd(self) -> None:
        """A new life of the PD at the same addresses; the front stays."""
        self._start_pd()
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
        elif 400 <= asked.status < 500:
            o.refused += 1
        else:
            o.failed += 1
        if asked.status != 200:
            o.waited_s = max(o.waited_s, asked.seconds)

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

    def conclude(self) -> Outcome:
        """Waits for what may still come: the PD's death shows at its next step."""
        self.innocent()
        deadline = time.monotonic() + DEATH_S
        troubled = self.outcome.failed > 0 or self.outcome.innocent_failed
        while troubled and self.pd.alive() and time.monotonic() < deadline:
            time.sleep(0.2)
        self.outcome.pd_died = not self._pd_lives()
        return self.outcome

    def _pd_lives(self) -> bool:
        try:
            return self.pd.alive() and ask(self.pd, "flush", max_tokens=1).status == 200
        except (HTTPException, OSError):
            return False

    def close(self) -> None:
        """Ends everybody."""
        self.front.stop()
        for server in (self._pd, *self._encoders):
            if server is not None:
                server.destroy()

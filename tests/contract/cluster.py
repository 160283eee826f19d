"""A PD and its encoders, which tests may kill: whoever comes next gets what is missing started anew."""

from collections.abc import Callable, Iterable
from http.client import HTTPException
from typing import Any

from tests.contract.client import Reply, ask, fresh, part
from tests.contract.target import Server, Target, free_port, until

__all__ = [
    "DEAD",
    "SPECIAL",
    "Cluster",
    "Special",
    "dead_answer",
    "dies",
    "encode",
    "forgetful",
    "gone",
    "victim",
]

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
Special = Callable[[Target, int], Server]
"""Starts an encoder of some special kind, which pushes to the PD of that port."""


def victim(target: Target, pull_port: int) -> Server:
    """One that takes its time for a large picture, and says what it is at."""
    slow = {"ECCON_SIM_ENCODE_MS_PER_MPIX": "100000"}
    return target.encoder(pull_port, "--enable-server-load-tracking", env=slow)


def forgetful(target: Target, pull_port: int) -> Server:
    """One that holds a single item, and not for long."""
    return target.encoder(pull_port, producer_cache_capacity=1, producer_cache_ttl_s=2)


SPECIAL: dict[str, Special] = {"killed": victim, "hoard": forgetful}
"""By the fixtures that want them."""


def encode(encoder: Server, uuid: str) -> None:
    """Have a picture encoded under this name."""
    assert ask(encoder, [part(uuid)], max_tokens=1).status == 200


def dies(pd: Server, content: object) -> Reply | None:
    """Ask what kills it; its answer, or None when the connection broke."""
    try:
        return ask(pd, content)
    except (HTTPException, ConnectionError):
        return None


def dead_answer(reply: Reply | None) -> None:
    """It tells of the engine's death, if there was time to tell anything."""
    if reply is not None:
        assert reply.status == 500, reply.body
        assert reply.error() == {"message": DEAD, "type": "InternalServerError", "param": None, "code": 500}


def gone(server: Server) -> None:
    """It exits by itself, with code 0 although it failed, and leaves nobody behind."""
    assert server.exit_code(30) == 0
    until(lambda: not server.family(), 10, "it left somebody behind")


class Cluster:
    """One PD, two encoders, and further encoders of special kinds while somebody wants them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.pull_port = free_port()
        self._pd: Server | None = None
        self._encoders: list[Server | None] = [None, None]
        self._special: dict[Special, Server] = {}

    @property
    def pd(self) -> Server:
        assert self._pd is not None
        return self._pd

    @property
    def encoders(self) -> tuple[Server, Server]:
        first, second = self._encoders
        assert first is not None
        assert second is not None
        return first, second

    def repair(self, **pd: Any) -> None:
        """Start what is not there, all at once. A PD may be about to die of what was done to it before.

        Args:
            pd: keys of the connector; with any of them there is a new PD in any case.
        """
        new_pd = bool(pd) or self._pd is None or not self._flushed(self._pd)
        if new_pd:
            self._new_pd(**pd)
        fresh_ones = []
        for i, encoder in enumerate(self._encoders):
            if encoder is None or not encoder.alive():
                if encoder is not None:
                    encoder.destroy()
                self._encoders[i] = started = self.target.encoder(self.pull_port)
                fresh_ones.append(started)
        self.pd.wait_ready()
        living = [*self.encoders, *(e for e in self._special.values() if e.alive() and e.listening())]
        self._link(living if new_pd else fresh_ones)

    def restart_pd(self, **extra: Any) -> None:
        """A new life of the PD, on the same connector port."""
        self.repair(**({"ping_interval_s": 60} | extra))

    def backwards(self) -> str:
        """Start an encoder while there is no PD, and the PD after it has encoded. The item's name."""
        encoder, u = self._encoders[0], fresh()
        for server in (self._pd, encoder):
            if server is not None:
                server.destroy()
        self._encoders[0] = encoder = self.target.encoder(self.pull_port)
        encoder.wait_ready()
        encoder.wait_log("is not accepting connections yet")
        encode(encoder, u)
        self._new_pd()
        self.pd.wait_ready()
        return u

    def ahead(self, *kinds: Special) -> None:
        """Start special encoders that will be wanted, and do not wait for them."""
        for kind in kinds:
            if kind not in self._special or not self._special[kind].alive():
                self._special[kind] = kind(self.target, self.pull_port)

    def special(self, kind: Special) -> Server:
        """A special encoder, ready, whose items arrive."""
        self.ahead(kind)
        encoder = self._special[kind]
        self._link([encoder])
        return encoder

    def dismiss(self, kind: Special) -> None:
        """It is wanted no more: it takes its memory with it."""
        if (encoder := self._special.pop(kind, None)) is not None:
            encoder.destroy()

    def _new_pd(self, **extra: Any) -> None:
        if self._pd is not None:
            self._pd.destroy()
        self._pd = self.target.pd(self.pull_port, **extra)

    def _link(self, encoders: Iterable[Server]) -> None:
        """Wait until what they push arrives: a socket finds a PD that is new in its own time."""
        for encoder in encoders:
            encoder.wait_ready()
            u = fresh()
            encode(encoder, u)
            self.pd.wait_event(f"received metadata for mm_hash={u}")
        assert ask(self.pd, "flush", max_tokens=1).status == 200

    @staticmethod
    def _flushed(pd: Server) -> bool:
        """Whether it lives, having heard of everything that was pushed to it."""
        try:
            return pd.alive() and ask(pd, "flush", max_tokens=1).status == 200
        except (HTTPException, ConnectionError):
            return False

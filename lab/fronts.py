"""What a client's request goes through on its way to the PD: nothing, the guide's proxy, or eccon's."""

import contextlib
import itertools
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from eccon.lab.place import Place, default
from lab import guide
from tests.contract.client import Reply, body, get, post
from tests.contract.target import Server, free_port

__all__ = ["PATIENCE_S", "Asked", "ByHand", "Eccon", "Front", "Guide"]

PATIENCE_S = 75.0
"""Of a client. The PD's own stall is 30 s; who has no answer after this has none."""


@dataclass(frozen=True)
class Asked:
    """What became of a request: `status` 0 when no answer came."""

    status: int
    seconds: float
    reply: Reply | None = None

    def answer(self) -> object:
        """Words and log-probabilities; None without an answer."""
        return self.reply.answer() if self.reply is not None and self.status == 200 else None

    @property
    def told_when(self) -> bool:
        """Whether it was turned away with a time at which to come again."""
        return self.status == 503 and self.reply is not None and "retry-after" in self.reply.headers


class Front(ABC):
    """A way to the PD."""

    name: str

    @abstractmethod
    def start(self, pds: list[Server], encoders: list[Server], rooms: list[str]) -> None:
        """In front of these; one that runs is ended first.

        Args:
            pds: with several, encoders push to them in turn.
            rooms: flags of eccon-proxy that say how much the connector was given.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ends it."""

    @abstractmethod
    def ask(self, content: object, **more: Any) -> Asked:
        """One user message, as any client sends it."""

    @abstractmethod
    def settled(self) -> bool:
        """Whether it takes requests: a proxy that watches its servers needs a moment after they changed."""


class Proxy(Front):
    """A process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._process: Server | None = None

    @abstractmethod
    def command(self, rooms: list[str]) -> list[str]:
        """argv, up to the flags that all proxies take."""

    def start(self, pds: list[Server], encoders: list[Server], rooms: list[str]) -> None:
        self.stop()
        port = free_port()
        where = ["--host", "127.0.0.1", "--port", str(port), *self.servers(pds, encoders)]
        argv = [*self.command(rooms), *where]
        self._process = Server(argv, dict(os.environ), port, self.directory / f"{self.name}.log", 60)
        self._process.wait_ready()

    def servers(self, pds: list[Server], encoders: list[Server]) -> list[str]:
        """Flags that name them."""
        return ["--encode-servers-urls", _urls(encoders), "--decode-servers-urls", _urls(pds)]

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    @property
    def process(self) -> Server:
        """The one that runs."""
        assert self._process is not None
        return self._process

    def ask(self, content: object, **more: Any) -> Asked:
        return _asked(self.process, body(content, **more))

    def settled(self) -> bool:
        with contextlib.suppress(HTTPException, OSError):
            return get(self.process, "/health").status == 200
        return False


def _urls(servers: list[Server]) -> str:
    return ",".join(f"http://127.0.0.1:{s.port}" for s in servers)


def _asked(server: Server, payload: object) -> Asked:
    began = time.monotonic()
    try:
        reply = post(server, payload, timeout=PATIENCE_S)
    except (HTTPException, OSError):
        return Asked(0, time.monotonic() - began)
    return Asked(reply.status, reply.seconds, reply)


class Guide(Proxy):
    """The guide's proxy, by the lab's Python, which has what it imports."""

    name = "guide"

    def __init__(self, directory: Path, text: Path) -> None:
        super().__init__(directory)
        self._python = str(Place(default()).vllm.with_name("python"))
        self._script = guide.extract(text, directory / "guide_proxy.py")

    def command(self, rooms: list[str]) -> list[str]:
        return [self._python, str(self._script)]


class Eccon(Proxy):
    """eccon-proxy as it is, told only how much room the connector has where that is not the default.

    Whether the connector is guarded it hears from the encoders.
    """

    name = "eccon"

    def command(self, rooms: list[str]) -> list[str]:
        return [sys.executable, "-m", "eccon_proxy", "--admin", f"unix:{self.directory}/admin.sock", *rooms]

    def servers(self, pds: list[Server], encoders: list[Server]) -> list[str]:
        named = super().servers(pds, encoders)
        if len(pds) == 1:
            return named
        theirs = (encoders[i :: len(pds)] for i in range(len(pds)))
        return named + [f"--group={_urls([pd])}={_urls(e)}" for pd, e in zip(pds, theirs, strict=True)]


class ByHand(Front):
    """No proxy: every `image_url` part to an encoder in turn, then the request to a PD.

    That is the guide's own rule. Of a part it is the model's name and the part itself that an encoder gets.
    """

    name = "by hand"

    def __init__(self) -> None:
        self._turns = itertools.count()
        self._encoders: list[Server] = []
        self._pds: list[Server] = []

    def start(self, pds: list[Server], encoders: list[Server], rooms: list[str]) -> None:
        self._pds, self._encoders = pds, encoders

    def stop(self) -> None:
        self._pds = []

    def ask(self, content: object, **more: Any) -> Asked:
        items = [p for p in content if p.get("type") == "image_url"] if isinstance(content, list) else []
        began = time.monotonic()
        with ThreadPoolExecutor(max(1, len(items))) as pool:
            encoded = pool.map(self._encode, items)
            failed = next((e for e in encoded if e.status != 200), None)
        asked = failed or _asked(random.choice(self._pds), body(content, **more))
        return replace(asked, seconds=time.monotonic() - began)

    def _encode(self, item: dict[str, Any]) -> Asked:
        server = self._encoders[next(self._turns) % len(self._encoders)]
        return _asked(server, body([item], max_tokens=1))

    def settled(self) -> bool:
        return True

"""One identity for one image: does whatever happens in between ever make it missing, or another image?

The hazards of a hash that was seen before, each in a form that ends or fools the vendor's connector. On the
stand-in, or with ECCON_LAB=DIR on real vLLM. The PD lets go of items after two seconds here, so that nothing
is right merely because it is still there (one on the stand-in). What a repeated image costs is printed.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.connector.guarded import GuardedCluster, GuardedLab, GuardedSim, GuardedTarget, encode
from tests.contract.client import Reply, ask, fresh, image, part, png, post, text
from tests.contract.target import Server, until

ON_LAB = "ECCON_LAB" in os.environ
pytestmark = pytest.mark.timeout(900 if ON_LAB else 120)
KEPT_S = 2.0 if ON_LAB else 1.0


class Watch:
    """What the PD's guard tells, on a socket of ours."""

    def __init__(self) -> None:
        self.path = Path(f"/tmp/eccon-identity-{uuid.uuid4().hex[:8]}.sock")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.setblocking(False)
        self._last: dict[str, str] = {}

    def forgotten(self, mm_hash: str) -> bool:
        """Whether the PD has let go of an item since it came."""
        while True:
            try:
                event = json.loads(self._socket.recv(8192))
            except BlockingIOError:
                break
            if event["k"] in {"pull_done", "evict"}:
                self._last[event["h"]] = event["k"]
        return self._last.get(mm_hash) == "evict"

    def close(self) -> None:
        self._socket.close()
        self.path.unlink()


class Forgetful(GuardedCluster):
    """Its PD soon lets go of what nobody wants."""

    def __init__(self, lab: GuardedTarget, watch: Watch) -> None:
        self.watch = watch
        super().__init__(lab)

    def new_pd(self) -> Server:
        return self.lab.pd(self.pull_port, guard_staged_ttl_s=KEPT_S, guard_events=str(self.watch.path))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forgetful]:
    directory = tmp_path_factory.mktemp("identity")
    lab: GuardedTarget = GuardedLab(directory) if ON_LAB else GuardedSim(directory)
    watch = Watch()
    try:
        made = Forgetful(lab, watch)
        made.settle()
        yield made
    finally:
        lab.close()
        watch.close()


class Picture:
    """An image under its one name, and what is right to say of it."""

    def __init__(self, cluster: Forgetful, width: int = 1024, height: int = 768) -> None:
        self.name = fresh()
        self.url = image(png(width, height))
        other = fresh()
        assert encode(cluster.first, other, url=self.url) == "delivered"
        self.right = self._say(cluster, other).answer()

    def encode(self, encoder: Server) -> None:
        """As the proxy does it: what was not delivered is encoded once more."""
        words = []
        for _ in range(2):
            words.append(encode(encoder, self.name, url=self.url))
            if words[-1] == "delivered":
                return
        raise AssertionError(words)

    def check(self, cluster: Forgetful) -> float:
        """Ask the PD; seconds."""
        reply = self._say(cluster, self.name)
        assert reply.answer() == self.right
        return reply.seconds

    def _say(self, cluster: Forgetful, name: str) -> Reply:
        options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": 30}
        return ask(cluster.pd, [part(name, self.url), text()], **options)


def forgotten(cluster: Forgetful, picture: Picture) -> None:
    """Wait until the PD has let go of it."""
    until(lambda: cluster.watch.forgotten(picture.name), 30, "it keeps it")


def test_the_same_image_in_every_turn_of_a_chat(cluster: Forgetful) -> None:
    a = Picture(cluster)
    turns: list[dict[str, Any]] = []
    for n in range(4):
        picture = [part(a.name, a.url), text("Describe it.")] if n == 0 else f"And now? {n}"
        turns.append({"role": "user", "content": picture})
        a.encode((cluster.first, cluster.small)[n % 2])
        asked = {"messages": turns, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 3}
        said = post(cluster.pd, asked)
        fresh_name = fresh()
        assert encode(cluster.first, fresh_name, url=a.url) == "delivered"
        first = {"role": "user", "content": [part(fresh_name, a.url), text("Describe it.")]}
        assert said.answer() == post(cluster.pd, asked | {"messages": [first, *turns[1:]]}).answer()
        turns.append({"role": "assistant", "content": said.answer()[0]})
        if n == 1:
            forgotten(cluster, a)


def test_another_image_where_the_first_one_was(cluster: Forgetful) -> None:
    """A, then B in its memory, others until the PD has let go of A, A again: the vendor's PD answers B."""
    a, b = Picture(cluster), Picture(cluster)
    assert a.right != b.right
    a.encode(cluster.first)
    a.check(cluster)
    b.encode(cluster.first)
    b.check(cluster)
    forgotten(cluster, a)
    for _ in range(3):
        Picture(cluster).encode(cluster.small)
    a.encode(cluster.first)
    a.check(cluster)
    a.encode(cluster.first)
    a.check(cluster)


def test_evicted_at_the_encoder_between(cluster: Forgetful) -> None:
    """One that keeps a single item, and whose own cache is full of others."""
    pictures = [Picture(cluster) for _ in range(4)]
    for order in (1, -1, 1):
        for p in pictures[::order]:
            p.encode(cluster.small)
            p.check(cluster)
        forgotten(cluster, pictures[::order][-1])


def test_by_two_encoders_and_many_at_once(cluster: Forgetful) -> None:
    pictures = [Picture(cluster) for _ in range(3)]

    def turn(n: int) -> None:
        p = pictures[n % 3]
        p.encode((cluster.first, cluster.small)[n // 3 % 2])
        p.check(cluster)

    with ThreadPoolExecutor(8) as pool:
        for job in [pool.submit(turn, n) for n in range(24)]:
            job.result()


def test_after_a_restart_of_the_pd(cluster: Forgetful) -> None:
    a, b = Picture(cluster), Picture(cluster)
    for p in (a, b):
        p.encode(cluster.first)
        p.check(cluster)
    cluster.restart_pd()
    for encoder in (cluster.first, cluster.small, cluster.first):
        for p in (b, a):
            p.encode(encoder)
            p.check(cluster)


def test_what_a_repeated_image_costs(cluster: Forgetful) -> None:
    rows: dict[str, list[float]] = {k: [] for k in ("new, encoder", "new, PD", "again, encoder", "again, PD")}
    for _ in range(10 if ON_LAB else 2):
        p = Picture(cluster)
        for when in ("new", "again", "again"):
            began = time.monotonic()
            p.encode(cluster.first)
            rows[f"{when}, encoder"].append(time.monotonic() - began)
            rows[f"{when}, PD"].append(p.check(cluster))
    for name, times in rows.items():
        print(f"{name}: {median(times) * 1e3:.0f} ms ({min(times) * 1e3:.0f} … {max(times) * 1e3:.0f})")

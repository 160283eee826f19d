"""What the EC connector says in the logs, line by line: where an item is on its way, and deaths announced.

Lines of its logger come in the format that `eccon.launch.logging_config` asks for, with microseconds. Texts
are those of vllm-rbln 0.12. Warnings are known by their text in any format.
"""

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

__all__ = ["ItemEvent", "Notice", "parse"]

Step = Literal["pushed", "received", "initiated", "complete", "acked"]


class ItemEvent(msgspec.Struct, frozen=True):
    """One item passed one step, at a Unix time of the process that says so."""

    step: Step
    at: float
    mm_hash: str


class Notice(msgspec.Struct, frozen=True):
    """Something that an operator must know. `key` is what it is about, once a life."""

    key: str
    severity: Literal["info", "warning", "critical"]
    text: str


EXACT = re.compile(
    rb"^(?:\([^)\n]*\) )*(\d{9,11}\.\d{6}) [A-Z]+ \d+ .*?vllm_rbln\.distributed\.ec_transfer[\w.]*:\d+ (.*)$"
)
STEPS: tuple[tuple[bytes, Step], ...] = (
    (b"registered + pushed mm_hash=", "pushed"),
    (b"received metadata for mm_hash=", "received"),
    (b"initiated pull for mm_hash=", "initiated"),
    (b"pull complete for mm_hash=", "complete"),
    (b"ACK status=ok for mm_hash=", "acked"),
)
HASH = re.compile(rb"mm_hash=([^\s,;]+)")
NOTICES: tuple[tuple[bytes, str, Literal["info", "warning", "critical"], str], ...] = (
    (
        b"timed out waiting for mm_hash=",
        "dying",
        "critical",
        "an image never arrived: the PD will exit now and be started again",
    ),
    (
        b"pulls did not complete within timeout",
        "dying",
        "critical",
        "an encoder did not deliver in time: the PD will exit now and be started again",
    ),
    (b"EngineDeadError", "dying", "critical", "the engine is dead: the process will exit now"),
    (
        b"failed to decode received metadata",
        "version",
        "critical",
        "encoder and PD speak different wire formats: run the same vllm-rbln on both",
    ),
    (b"LRU-evicting", "evicting", "warning", "items are evicted before the PD took them: raise its capacity"),
    (b"first contact from consumer engine=", "consumer", "info", "a new PD took up contact"),
)
ANY = re.compile(b"|".join(re.escape(text) for text in [b"mm_hash=", *(n[0] for n in NOTICES)]))


def parse(lines: bytes) -> Iterator[ItemEvent | Notice]:
    """Events in `lines`, whole lines as read from a log. What is of no interest costs one search."""
    at = 0
    while found := ANY.search(lines, at):
        start = lines.rfind(b"\n", 0, found.start()) + 1
        end = lines.find(b"\n", found.end())
        end = len(lines) if end < 0 else end
        at = end
        line = lines[start:end]
        if event := _item(line):
            yield event
        elif notice := _notice(line):
            yield notice


def _item(line: bytes) -> ItemEvent | None:
    exact = EXACT.match(line)
    if exact is None:
        return None
    message = exact[2]
    for text, step in STEPS:
        if text in message:
            found = HASH.search(message)
            if found:
                return ItemEvent(step, float(exact[1]), found[1].decode(errors="replace"))
    return None


def _notice(line: bytes) -> Notice | None:
    for text, key, severity, told in NOTICES:
        if text in line:
            return Notice(key, severity, told)
    return None

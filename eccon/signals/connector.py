"""What the EC connector says in the logs, line by line: where an item is on its way, and deaths announced.

Lines of its logger come in the format that `eccon.launch.logging_config` asks for, with microseconds. Texts
are those of vllm-rbln 0.12. Warnings are known in vLLM's own format too. Nothing counts that does not stand
where a logger puts its message: prompts, which clients choose, may stand in a log as well.
"""

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

__all__ = ["ItemEvent", "Notice", "parse"]

Step = Literal["pushed", "received", "initiated", "complete", "acked", "evicted"]
Severity = Literal["info", "warning", "critical"]


class ItemEvent(msgspec.Struct, frozen=True):
    """One item passed one step, at a Unix time of the process that says so."""

    step: Step
    at: float
    mm_hash: str


class Notice(msgspec.Struct, frozen=True):
    """Something that an operator must know. `key` is what it is about, once a life."""

    key: str
    severity: Severity
    text: str
    peer: str = ""
    """Id of the engine that the line names, if any."""


PROCESS = rb"^(?:\([^()\n]*\) )*"
EXACT = re.compile(
    PROCESS + rb"(\d{9,11}\.\d{6}) [A-Z]+ \d+ .*?vllm_rbln\.distributed\.ec_transfer[\w.]*:\d+ (.*)$"
)
PLAIN = re.compile(
    PROCESS
    + rb"(?:\[vllm-rbln\] )?(?:INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]\n]*:\d+\] (.*)$"
)
RAISED = re.compile(PROCESS + rb"((?:[\w.]+\.)?EngineDeadError\b.*)$")
"""A traceback's last line, as uvicorn prints it."""
STEPS: tuple[tuple[bytes, Step], ...] = (
    (rb"registered \+ pushed mm_hash=", "pushed"),
    (rb"received metadata for mm_hash=", "received"),
    (rb"initiated pull for mm_hash=", "initiated"),
    (rb"pull complete for mm_hash=", "complete"),
    (rb"ACK status=ok for mm_hash=", "acked"),
    (rb"(?:LRU|TTL)-evicting producer cache for mm_hash=", "evicted"),
)
STEP = re.compile(
    rb"(?:EC Nixl: )?(?:%b)([^\s,;]+)" % b"|".join(b"(%b)" % text for text, _ in STEPS),
)
NOTICES: tuple[tuple[re.Pattern[bytes], str, Severity, str], ...] = (
    (
        re.compile(rb"(?:EC Nixl: )?timed out waiting for mm_hash="),
        "dying",
        "critical",
        "an image never arrived: the PD will exit now and be started again",
    ),
    (
        re.compile(rb"(?:EC Nixl: )?\d+ pulls did not complete within timeout"),
        "dying",
        "critical",
        "an encoder did not deliver in time: the PD will exit now and be started again",
    ),
    (
        re.compile(rb"(?:[\w.]+\.)?EngineDeadError\b"),
        "dying",
        "critical",
        "the engine is dead: the process will exit now",
    ),
    (
        re.compile(rb"(?:EC Nixl: )?failed to decode received metadata"),
        "version",
        "critical",
        "encoder and PD speak different wire formats: run the same vllm-rbln on both",
    ),
    (
        re.compile(rb"(?:EC Nixl: )?LRU-evicting "),
        "evicting",
        "warning",
        "items are evicted before the PD took them: raise its capacity",
    ),
    (
        re.compile(rb"(?:EC Nixl: )?first contact from consumer engine=(\S+)"),
        "consumer",
        "info",
        "in contact with the PD",
    ),
)
WORDS = (
    b"mm_hash=",
    b"pulls did not complete within timeout",
    b"EngineDeadError",
    b"failed to decode received metadata",
    b"first contact from consumer engine=",
)
ANY = re.compile(b"|".join(map(re.escape, WORDS)))


def parse(lines: bytes) -> Iterator[ItemEvent | Notice]:
    """Events in `lines`, whole lines as read from a log. What is of no interest costs next to nothing."""
    # A search for plain words is many times faster than one for a pattern: a flood is read by this alone.
    if not any(word in lines for word in WORDS):
        return
    at = 0
    while found := ANY.search(lines, at):
        start = lines.rfind(b"\n", 0, found.start()) + 1
        end = lines.find(b"\n", found.end())
        end = len(lines) if end < 0 else end
        at = end
        yield from _events(lines[start:end])


def _events(line: bytes) -> Iterator[ItemEvent | Notice]:
    if exact := EXACT.match(line):
        message = exact[2]
        if step := STEP.match(message):
            which = next(i for i, text in enumerate(step.groups()[:-1]) if text)
            mm_hash = step[len(STEPS) + 1].decode(errors="replace")
            yield ItemEvent(STEPS[which][1], float(exact[1]), mm_hash)
    elif other := PLAIN.match(line) or RAISED.match(line):
        message = other[1]
    else:
        return
    for text, key, severity, told in NOTICES:
        if found := text.match(message):
            peer = found[1].decode(errors="replace") if text.groups else ""
            yield Notice(key, severity, told, peer)
            return

"""Sending test prompts: one, or many for a load of bounded length; what is counted is kept here."""

import asyncio
import itertools
import json
import re
import shlex
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eccon import prompt
from eccon.console.source import Problem, Source

__all__ = ["Draft", "Run", "as_curl", "as_python", "load_of", "load_text", "send"]

LOAD_MAX = 256
REPEAT_MAX = 10_000
SECONDS_MAX = 3600.0
BODY_END = "END_OF_BODY"
_LOAD = re.compile(r"(\d{1,9})(s?|m)(?:x(\d{1,9}))?")


@dataclass(frozen=True)
class Draft:
    """What the fields of the prompt say."""

    model: str
    text: str
    images: str
    stream: bool = True
    max_tokens: int = 256
    extra: str = ""
    repeat: int = 1
    at_once: int = 1
    seconds: float = 0.0
    """More than 0: requests are begun for so long, `at_once` at a time, whatever `repeat` says."""


def load_of(text: str) -> tuple[int, float, int]:
    """Requests, seconds and how many at once that a load says: "20x4" is (20, 0, 4), "30s x4" (1, 30, 4).

    Raises:
        PromptError: it says something else, or too much.
    """
    found = _LOAD.fullmatch(text.replace(" ", "") or "1")
    if found is None:
        msg = f"load: {text!r} is neither like 20x4 (twenty requests, four at once) nor like 30sx4"
        raise prompt.PromptError(msg)
    number, at_once = int(found[1]), int(found[3] or 1)
    seconds = number * {"": 0.0, "s": 1.0, "m": 60.0}[found[2]]
    repeat = 1 if seconds else number
    if not (1 <= at_once <= LOAD_MAX and 1 <= repeat <= REPEAT_MAX and seconds <= SECONDS_MAX):
        msg = (
            f"load: at most {REPEAT_MAX} requests or {SECONDS_MAX / 60:.0f} minutes, "
            f"1 to {LOAD_MAX} of them at once"
        )
        raise prompt.PromptError(msg)
    return repeat, seconds, at_once


def load_text(draft: Draft) -> str:
    """A draft's load as `load_of` reads it."""
    number = f"{draft.seconds:.0f}s" if draft.seconds else str(draft.repeat)
    return number if draft.at_once == 1 else f"{number}x{draft.at_once}"


@dataclass
class Run:
    """One run of a draft: the first answer's text, and figures over all."""

    request_id: str
    total: int
    """Requests; 0 when they are sent for a time."""
    started: float = field(default_factory=time.monotonic)
    reader: prompt.StreamReader = field(default_factory=prompt.StreamReader)
    done: int = 0
    failed: int = 0
    first_bytes: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""
    ended: float | None = None
    stopped: bool = False
    """Whether it was ended before its time."""

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return self.ended is not None

    def end(self) -> None:
        """Nothing more comes."""
        if self.ended is None:
            self.ended = time.monotonic()

    def lasted(self) -> float:
        """Seconds from the beginning to the end, or to now."""
        return (time.monotonic() if self.ended is None else self.ended) - self.started


def build(draft: Draft) -> bytes:
    """The request's body. Raises PromptError."""
    return _build(draft, _extra(draft))


def _build(draft: Draft, extra: Mapping[str, Any]) -> bytes:
    from eccon.console.images import expand  # noqa: PLC0415  loaded when wanted

    return prompt.build(
        draft.model,
        draft.text,
        expand(draft.images),
        stream=draft.stream,
        max_tokens=draft.max_tokens,
        extra=extra,
    )


def _extra(draft: Draft) -> dict[str, Any]:
    if not draft.extra.strip():
        return {}
    try:
        extra = json.loads(draft.extra)
    except ValueError as e:
        msg = f"extra: {e}"
        raise prompt.PromptError(msg) from e
    if not isinstance(extra, dict):
        msg = 'extra: not a JSON object like {"temperature": 0}'
        raise prompt.PromptError(msg)
    return extra


async def send(link: Source, draft: Draft, run: Run, changed: Callable[[], None]) -> None:
    """Sends the draft as often as it says; `changed` is called when `run` is another.

    Raises:
        PromptError: the draft makes no request.
    """
    body = await asyncio.to_thread(build, draft)
    run.started = time.monotonic()
    numbers = iter(range(draft.repeat)) if not draft.seconds else itertools.count()
    end = time.monotonic() + draft.seconds if draft.seconds else None

    async def lane() -> None:
        for n in numbers:
            await _one(link, body, run, n, changed)
            if end is not None and time.monotonic() >= end:
                return

    try:
        await asyncio.gather(*(lane() for _ in range(draft.at_once)))
    finally:
        run.end()
        changed()


async def _one(link: Source, body: bytes, run: Run, n: int, changed: Callable[[], None]) -> None:
    reader = run.reader if n == 0 else prompt.StreamReader()
    began = time.monotonic()
    first: float | None = None
    error = ""
    try:
        async for chunk in link.prompt(body, run.request_id if n == 0 else f"{run.request_id}-{n}"):
            if first is None:
                first = time.monotonic() - began
                run.first_bytes.append(first)
            reader.feed(chunk)
            if n == 0:
                changed()
        reader.close()
        error = reader.error or ""
    except Problem as e:
        error = str(e)
    run.took.append(time.monotonic() - began)
    if error:
        run.failed += 1
        run.error = run.error or error
    else:
        run.done += 1
        run.tokens += int((reader.usage or {}).get("completion_tokens") or 0)
    changed()


def new_run(draft: Draft) -> Run:
    """A run with an id by which its trace is found again."""
    return Run(f"console-{uuid.uuid4().hex[:8]}", 0 if draft.seconds else draft.repeat)


def as_curl(draft: Draft, url: str) -> str:
    """The draft as a curl command, its body by stdin: images make it longer than an argument may be.

    Raises:
        PromptError: the draft makes no request.
    """
    body = build(draft).decode()
    end = f"END_OF_{uuid.uuid4().hex[:8]}" if BODY_END in body else BODY_END
    return (
        f"curl -sSN {shlex.quote(url.rstrip('/') + '/v1/chat/completions')} "
        f"-H 'Content-Type: application/json' --data-binary @- <<'{end}'\n{body}\n{end}\n"
    )


def as_python(draft: Draft, url: str) -> str:
    """The draft as a Python script for the openai client. Raises PromptError."""
    extra = _extra(draft)
    stream = bool(extra.pop("stream", draft.stream))  # the client has to know it
    body = json.loads(_build(replace(draft, stream=stream), {}))
    arguments = ", ".join(f"{name}={value!r}" for name, value in body.items())
    if extra:
        arguments += f", extra_body={extra!r}"  # vLLM has parameters that the client does not know
    return (
        "from openai import OpenAI\n\n"
        f"client = OpenAI(base_url={url.rstrip('/') + '/v1'!r}, api_key='none')\n"
        f"answer = client.chat.completions.create({arguments})\n"
        + (
            "for chunk in answer:\n"
            "    for choice in chunk.choices:\n"
            "        print(choice.delta.content or '', end='', flush=True)\n"
            "print()\n"
            if stream
            else "print(answer.choices[0].message.content)\n"
        )
    )

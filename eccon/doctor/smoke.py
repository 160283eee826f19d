"""Sends a tiny image through every encoder of a running cluster, and says what became of each."""

import asyncio
import base64
import io
import time
import uuid
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from PIL import Image

from eccon import prompt
from eccon.client import Client, ControlError, NotRunning
from eccon.doctor.finding import Finding, bad, good, note
from eccon.model import ClusterState, Process, Role, State, Trace

__all__ = ["smoke"]

IMAGES_MAX = 8
"""In one request, as in the guide's; the proxy gives each another encoder."""
ROUNDS = 4
TRACE_S = 10.0
"""How long the daemon may take to hear of a request's end."""

T = TypeVar("T")


async def smoke(client: Client, timeout_s: float) -> list[Finding]:
    """A text request to the PD, then images until every encoder that is ready has encoded one.

    Args:
        timeout_s: for each request.

    Raises:
        NotRunning, ControlError: the daemon cannot be asked.
    """
    state = await client.state()
    model = state.cluster.model
    found = [
        _not_tried(p) for p in state.processes if p.role is not Role.PROXY and p.state is not State.READY
    ]
    text = prompt.build(model, "Say yes.", max_tokens=1)
    _, fault = await _ask(client, text, timeout_s)
    if fault:
        return [*found, bad("smoke-text", "the PD does not answer a text request", fault,
                            advice="`eccon logs pd` may say why")]  # fmt: skip
    found.append(good("smoke-text", "the PD answers a text request"))
    ready = [p.name for p in state.processes if p.role is Role.ENCODER and p.state is State.READY]
    done: dict[str, str] = {}
    faults: dict[str, str] = {}
    failed = ""
    for _ in range(ROUNDS):
        missing = [n for n in ready if n not in done and n not in faults]
        if not missing or failed:
            break
        images = list(_images(min(IMAGES_MAX, len(ready))))
        body = prompt.build(model, "What colour is each?", images, max_tokens=1)
        trace, failed = await _ask(client, body, timeout_s)
        for span in trace.spans if trace else ():
            if span.kind != "encode":
                continue
            if span.outcome == "ok" and span.end is not None:
                done.setdefault(span.encoder, f"{(span.end - span.start) * 1000:.0f} ms")
            elif span.outcome in {"error", "timeout"}:
                faults[span.encoder] = span.error or span.outcome
    return [*found, *_judged(ready, done, faults, failed)]


def _judged(ready: list[str], done: dict[str, str], faults: dict[str, str], failed: str) -> Iterator[Finding]:
    for name in ready:
        if name in faults:
            advice = f"`eccon logs {name}` may say why; `eccon restart {name}` begins anew"
            yield bad("smoke-image", f"{name} does not encode", faults[name], advice=advice)
        elif name in done and not failed:
            yield good("smoke-image", f"an image went through {name}", f"encoded in {done[name]}")
        elif name not in done and not failed:
            advice = "try again; the proxy's policy may prefer others"
            yield note("smoke-image", f"the proxy sent no image to {name}", "", advice)
    if failed:
        advice = "`eccon traces` shows the request's way; `eccon logs pd` may say more"
        yield bad("smoke-image", "a request with images was not answered", failed, advice=advice)


def _not_tried(process: Process) -> Finding:
    reason = f"{process.state.value}: {process.reason}" if process.reason else process.state.value
    advice = f"`eccon status` tells its state, `eccon start {process.name}` starts it"
    return bad("smoke-ready", f"{process.name} is not ready", reason, advice=advice)


def _images(count: int) -> Iterator[str]:
    """1×1 each, of colours that were not sent before: identical ones would be encoded once."""
    for colour in uuid.uuid4().bytes[:count]:
        data = io.BytesIO()
        Image.new("RGB", (1, 1), (colour, *uuid.uuid4().bytes[:2])).save(data, "PNG")
        yield "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


async def _ask(client: Client, body: bytes, timeout_s: float) -> tuple[Trace | None, str]:
    """The request's trace, once it has ended, and what was wrong."""
    request_id = f"doctor-{uuid.uuid4().hex[:12]}"
    reader = prompt.StreamReader()

    async def answer() -> str:
        async for chunk in client.prompt(body, request_id):
            reader.feed(chunk)
        return reader.error or ""

    try:
        fault = await _within(answer(), timeout_s)
    except (ControlError, NotRunning) as e:
        fault = str(e)
    if fault is None:
        fault = f"no answer within {timeout_s:g} s"
    return await _trace(client, request_id), fault


async def _within(work: Coroutine[Any, Any, T], seconds: float) -> T | None:
    """Its result; None when it takes longer, and it is ended then."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        return task.result() if done else None
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _trace(client: Client, request_id: str) -> Trace | None:
    end = time.monotonic() + TRACE_S
    while True:
        state: ClusterState = await client.state()
        found = next((t for t in state.traces if t.id == request_id), None)
        if (found is not None and found.status) or time.monotonic() > end:
            return found
        await asyncio.sleep(0.1)

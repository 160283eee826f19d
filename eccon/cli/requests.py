"""Commands about requests: send a test prompt, look at traces."""

import asyncio
import sys
import uuid
from typing import Any

import click
import msgspec

from eccon import prompt
from eccon.cli.common import FAILED, USAGE, command, config_option, control_socket, follow, narrate
from eccon.client import Client
from eccon.model import ClusterState, Trace

__all__ = ["ask", "send", "traces"]

TEXT = "Briefly describe each of these images."
TRANSFER_WAIT_S = 3.0
"""How long after an answer its transfer times may come: they take the way over the log files."""


@click.command()
@config_option
@click.option("-t", "--text", default=TEXT, show_default=True)
@click.option("-i", "--image", "images", multiple=True, metavar="PATH|URL", help="Repeat for more.")
@click.option("--samples", is_flag=True, help="The eight images that come with eccon.")
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--model", help="Default: the cluster's.")
@click.option("--extra", metavar="JSON", help="More keys of the request's body.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds for the whole answer.")
@command
async def send(
    file: str | None,
    text: str,
    images: tuple[str, ...],
    samples: bool,
    stream: bool,
    max_tokens: int,
    model: str | None,
    extra: str | None,
    timeout: float,
) -> int:
    """Send a test prompt through the proxy: the answer to stdout, each image's way to stderr."""
    try:
        more = msgspec.json.decode(extra, type=dict[str, Any]) if extra else None
    except msgspec.MsgspecError as e:
        narrate(f"eccon: --extra is not a JSON object: {e}")
        return USAGE
    every = [*images, *(map(str, prompt.samples()) if samples else ())]
    async with Client(control_socket(file)) as client:
        state = await client.state()
        try:
            body = prompt.build(
                model or state.cluster.model, text, every, stream=stream, max_tokens=max_tokens, extra=more
            )
        except prompt.PromptError as e:
            narrate(f"eccon: {e}")
            return USAGE
        trace, error = await asyncio.wait_for(ask(client, body), timeout)
        for line in prompt.image_lines(trace) if trace else ():
            narrate(line)
    if error:
        narrate(f"eccon: {error}")
        return FAILED
    return 0


async def ask(client: Client, body: bytes) -> tuple[Trace | None, str | None]:
    """Sends `body`, writes the answer to stdout as it comes; its trace with transfers, and any error."""
    request_id = f"eccon-{uuid.uuid4().hex[:12]}"
    reader = prompt.StreamReader()

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    async for chunk in client.prompt(body, request_id):
        show(reader.feed(chunk))
    show(reader.close())
    if reader.text:
        show("\n")
    error = reader.error or (None if reader.finished else "the answer broke off")
    try:
        trace = await asyncio.wait_for(_trace(client, request_id), TRANSFER_WAIT_S)
    except asyncio.TimeoutError:
        trace = _find(await client.state(), request_id)
    return trace, error


def _find(state: ClusterState, trace_id: str) -> Trace | None:
    return next((t for t in reversed(state.traces) if t.id == trace_id), None)


async def _trace(client: Client, trace_id: str) -> Trace | None:
    async for state in follow(client):
        trace = _find(state, trace_id)
        if trace and trace.total_s is not None:
            pulled = {s.uuid for s in trace.spans if s.kind == "pull"}
            if all(s.uuid in pulled for s in trace.spans if s.kind == "encode" and s.outcome == "ok"):
                return trace
    return None


@click.command()
@click.argument("trace_id", required=False)
@config_option
@click.option("-n", "--lines", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="As JSON, one trace a line.")
@command
async def traces(trace_id: str | None, file: str | None, lines: int, as_json: bool) -> int:
    """List the newest requests, or show the way of TRACE_ID."""
    async with Client(control_socket(file)) as client:
        state = await client.state()
    found = [t for t in state.traces if t.id == trace_id] if trace_id else list(state.traces[-lines:])
    if trace_id and not found:
        narrate(f"eccon: no trace {trace_id}; `eccon traces` lists those that are kept")
        return FAILED
    for t in found:
        if as_json:
            click.echo(msgspec.json.encode(t))
            continue
        click.echo(_line(t))
        if trace_id:
            for s in t.spans:
                end = "…" if s.end is None else f"{s.end:.3f}"
                item = "" if s.item is None else f"image {s.item + 1}"
                what = f"  {s.kind:<7} {item:<9} {s.encoder:<12} {s.start:7.3f} → {end:>7} s"
                click.echo(f"{what}  {s.outcome}{': ' + s.error if s.error else ''}".rstrip())
    return 0


def _line(t: Trace) -> str:
    def s(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}s"

    how = str(t.status or "…")
    return (
        f"{t.id:<20} {how:>4} {t.items:>3} img  ttft {s(t.ttft_s):>7}  total {s(t.total_s):>7}"
        f"  {t.completion_tokens or 0:>5} tok  {t.error}".rstrip()
    )

"""What leaves the console as text or files: curl lines, traces as JSON, the clipboard's copy."""

import json
import os
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from eccon.model import Process, Trace

__all__ = [
    "CLIPBOARD_MAX",
    "chrome_events",
    "command_line",
    "curl",
    "safe",
    "save_copy",
    "write_chrome",
    "write_json",
]

CLIPBOARD_MAX = 74_994
"""Bytes, base64 encoded, that terminals take in one OSC 52; longer ones are cut or dropped by some."""


def curl(trace: Trace, public_url: str) -> str:
    """A curl line of the same shape as the request. Bodies are not kept, so images are placeholders."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"IMAGE_{i + 1}_URL"}} for i in range(trace.items)
    ]
    content: Any = [*parts, {"type": "text", "text": "TEXT"}] if parts else "TEXT"
    body = {
        "model": trace.model,
        "messages": [{"role": "user", "content": content}],
        **({"stream": True} if trace.stream else {}),
    }
    return (
        f"curl -sS {shlex.quote(public_url.rstrip('/') + trace.route)} "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    )


def command_line(process: Process) -> str:
    """The process's argv as a shell line; secrets were masked by the daemon."""
    return shlex.join(process.argv)


def save_copy(text: str) -> str:
    """Writes `text` into a private file of its own and returns where: clipboards lose things.

    Raises:
        OSError: there is no room for it.
    """
    fd, name = tempfile.mkstemp(prefix="eccon-copy-", suffix=".txt")
    with os.fdopen(fd, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    return name


def _write(name: str, data: bytes) -> str:
    """Whole or not at all: what a full disk cut off is taken away."""
    path = Path(name).absolute()
    try:
        file = path.open("wb")
    except OSError as e:
        return f"not written, {e.strerror}: {path}"
    try:
        with file:
            file.write(data)
    except OSError as e:
        path.unlink(missing_ok=True)
        return f"not written, {e.strerror}: {path}"
    return f"written: {path}"


def safe(text: str) -> str:
    """`text` as a part of a file's name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text)[:60]


def _file_name(trace: Trace, kind: str) -> str:
    return f"trace-{safe(trace.id)}{kind}.json"


def write_json(trace: Trace) -> str:
    """Writes the trace as JSON into the present directory; says where, or what went wrong."""
    data = msgspec.json.format(msgspec.json.encode(trace), indent=2)
    return _write(_file_name(trace, ""), data)


def write_chrome(trace: Trace) -> str:
    """Writes the trace in Chrome's trace event format; says where, or what went wrong."""
    data = json.dumps({"traceEvents": chrome_events(trace), "displayTimeUnit": "ms"}, ensure_ascii=False)
    return _write(_file_name(trace, "-chrome"), data.encode("utf-8", "replace"))


def chrome_events(trace: Trace) -> list[dict[str, Any]]:
    """Complete events ("X") in microseconds, a thread a row of the waterfall."""
    base = trace.started_at * 1e6
    lasting = (trace.total_s if trace.total_s is not None else time.time() - trace.started_at) * 1e6
    events: list[dict[str, Any]] = [
        {"name": trace.id, "ph": "X", "pid": 1, "tid": 0, "ts": base, "dur": lasting, "cat": "request"}
    ]
    lanes = {s.uuid: n + 1 for n, s in enumerate(s for s in trace.spans if s.kind == "encode" and s.uuid)}
    for span in trace.spans:
        end = span.end if span.end is not None else lasting / 1e6
        events.append(
            {
                "name": span.kind,
                "cat": span.kind,
                "ph": "X",
                "pid": 1,
                "tid": lanes.get(span.uuid, 0),
                "ts": base + span.start * 1e6,
                "dur": max(0.0, (end - span.start) * 1e6),
                "args": {
                    "item": span.item,
                    "encoder": span.encoder,
                    "outcome": span.outcome,
                    "error": span.error,
                },
            }
        )
    return events

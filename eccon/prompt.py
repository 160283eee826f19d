"""A test prompt: builds the chat request, reads its answer as it comes, says what became of each image."""

import base64
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from eccon.model import Trace

__all__ = [
    "ImageReport",
    "PromptError",
    "StreamReader",
    "build",
    "image_lines",
    "image_reports",
    "image_type",
    "samples",
]

SAMPLES = Path(__file__).parent / "sim" / "samples"
IMAGE_BYTES_MAX = 64 * 2**20


class PromptError(Exception):
    """The prompt cannot be built; the message says which image and why."""


def samples() -> list[Path]:
    """The eight images that come with the package, in order."""
    return sorted(p for p in SAMPLES.iterdir() if image_type(p))


def image_type(path: Path) -> str | None:
    """The media type that a file's name promises; None when that is no image's."""
    # Not strict: WebP is a common type only, until Python 3.13, where no /etc/mime.types says more.
    kind = mimetypes.guess_type(path.name, strict=False)[0] or ""
    return kind if kind.startswith("image/") else None


def build(
    model: str,
    text: str,
    images: Sequence[str] = (),
    *,
    stream: bool = False,
    max_tokens: int = 256,
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """A chat-completion body, images first and then the text, as the vendor's guide has it.

    Args:
        images: paths, or http(s) and data URLs. A path's bytes go along as a data URL.
        extra: more keys of the body; they win.

    Raises:
        PromptError: an image cannot be read, or is none.
    """
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": image_url(image)}} for image in images
    ]
    content: Any = [*parts, {"type": "text", "text": text}] if parts else text
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body | dict(extra or {}))


def image_url(image: str) -> str:
    """`image` itself when it is a URL, else the file's bytes as a data URL. Raises PromptError."""
    if image.startswith(("http://", "https://", "data:")):
        return image
    path = Path(image).expanduser()
    kind = image_type(path)
    try:
        size = path.stat().st_size
        if size > IMAGE_BYTES_MAX:
            msg = f"{image}: {size / 2**20:.0f} MiB is more than {IMAGE_BYTES_MAX // 2**20} MiB"
            raise PromptError(msg)
        if kind is None:
            msg = f"{image}: not a file name of an image (.png, .jpg, .webp, …)"
            raise PromptError(msg)
        data = path.read_bytes()
    except OSError as e:
        msg = f"{image}: cannot be read: {e.strerror}"
        raise PromptError(msg) from e
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


class StreamReader:
    """Reads an answer, SSE or plain JSON, from chunks cut anywhere."""

    def __init__(self) -> None:
        self.text = ""
        self.error: str | None = None
        self.usage: dict[str, Any] | None = None
        self.finished = False
        """The answer is whole: a `finish_reason` came, or a complete JSON answer."""
        self._rest = b""

    def feed(self, chunk: bytes) -> str:
        """Text that is new with this chunk."""
        before = len(self.text)
        self._rest += chunk
        if self._rest.lstrip()[:1] == b"{":
            return ""
        *lines, self._rest = self._rest.replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())
        return self.text[before:]

    def close(self) -> str:
        """Ends the answer; returns text that only now could be read (a plain JSON answer's all)."""
        before = len(self.text)
        rest = self._rest.strip()
        self._rest = b""
        if rest.startswith(b"data:"):
            rest = rest[5:].strip()
        if rest:
            self._event(rest)
        return self.text[before:]

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError:
            self.error = f"an answer that is not JSON: {data[:200].decode(errors='replace')}"
            return
        if not isinstance(event, dict):
            return
        if error := event.get("error"):
            self.error = str(error.get("message", error)) if isinstance(error, dict) else str(error)
            return
        if isinstance(event.get("usage"), dict):
            self.usage = event["usage"]
        for choice in event.get("choices") or ():
            piece = choice.get("delta") or choice.get("message") or {}
            self.text += piece.get("content") or ""
            if choice.get("finish_reason"):
                self.finished = True


class ImageReport(msgspec.Struct, frozen=True):
    """What became of one image. Milliseconds; None where nothing is known."""

    item: int
    encoder: str
    encode_ms: float | None
    transfer_ms: float | None
    attempts: int


def image_reports(trace: Trace) -> list[ImageReport]:
    """One row an encoded item, in order: the attempt that succeeded, and its push + pull."""
    rows: list[ImageReport] = []
    for item in sorted({s.item for s in trace.spans if s.kind == "encode" and s.item is not None}):
        encodes = [s for s in trace.spans if s.kind == "encode" and s.item == item]
        last = next((s for s in encodes if s.outcome == "ok" and s.end is not None), encodes[-1])
        moves = [s for s in trace.spans if s.kind in ("push", "pull") and s.uuid == last.uuid and s.uuid]
        whole = {s.kind for s in moves} == {"push", "pull"}
        transfer = sum((s.end - s.start) * 1000 for s in moves if s.end is not None) if whole else None
        took = None if last.end is None else (last.end - last.start) * 1000
        rows.append(ImageReport(item, last.encoder, took, transfer, len(encodes)))
    return rows


def image_lines(trace: Trace) -> list[str]:
    """`image_reports` as text, one line an image."""

    def ms(value: float | None) -> str:
        return "–" if value is None else f"{value:.1f} ms"

    return [
        f"image {r.item + 1}  {r.encoder:<12}  encode {ms(r.encode_ms):>9}  transfer {ms(r.transfer_ms):>8}"
        + (f"  ({r.attempts} attempts)" if r.attempts > 1 else "")
        for r in image_reports(trace)
    ]

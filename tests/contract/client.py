"""Requests of the contract tests, by the standard library alone, and pictures to ask about."""

import base64
import io
import itertools
import json
import os
import socket
from dataclasses import dataclass
from http.client import HTTPConnection
from time import monotonic
from typing import Any

from PIL import Image

from tests.contract.target import MODEL, Server

__all__ = [
    "CHAT",
    "Reply",
    "ask",
    "body",
    "fresh",
    "get",
    "image",
    "metric",
    "open_stream",
    "part",
    "png",
    "post",
    "text",
]

CHAT = "/v1/chat/completions"
_serial = itertools.count()


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    def json(self) -> Any:
        """Its body."""
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """Its error object, which must have vLLM's four keys."""
        error: dict[str, Any] = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.status
        return error

    def events(self) -> list[str]:
        """The data of each event of a stream; each event is one line and a blank one."""
        *events, rest = self.body.decode().split("\n\n")
        assert rest == ""
        assert all(e.startswith("data: ") and "\n" not in e for e in events)
        return [e[6:] for e in events]

    def answer(self) -> tuple[str, Any]:
        """What was said, and with which log-probabilities: equal only for equal prompts and equal images."""
        assert self.status == 200, self.body
        choice = self.json()["choices"][0]
        return choice["message"]["content"], choice["logprobs"]


def request(
    server: Server, method: str, path: str, data: bytes | None, headers: dict[str, str], timeout: float
) -> Reply:
    """One request on a connection of its own."""
    began = monotonic()
    connection = HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    try:
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        content = answer.read()
        names = {k.lower(): v for k, v in answer.getheaders()}
        return Reply(answer.status, names, content, monotonic() - began)
    finally:
        connection.close()


def get(server: Server, path: str, *, method: str = "GET", headers: dict[str, str] | None = None) -> Reply:
    """Anything without a body."""
    return request(server, method, path, None, headers or {}, 20)


def post(
    server: Server, payload: object, *, headers: dict[str, str] | None = None, timeout: float = 90
) -> Reply:
    """A chat completion; bytes are sent as they are, a header of "" is left out."""
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    sent = {"Content-Type": "application/json"} | (headers or {})
    return request(server, "POST", CHAT, data, {k: v for k, v in sent.items() if v}, timeout)


def body(content: object, **more: Any) -> dict[str, Any]:
    """A request of one user message."""
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **more}


def ask(server: Server, content: object, timeout: float = 90, **more: Any) -> Reply:
    """Send a user message."""
    return post(server, body(content, **more), timeout=timeout)


def fresh() -> str:
    """A uuid that nobody has seen."""
    return f"item-{os.urandom(6).hex()}"


def png(width: int = 64, height: int = 64, colour: tuple[int, int, int] | None = None) -> bytes:
    """A picture like no other before, unless a colour is given."""
    n = next(_serial) + int.from_bytes(os.urandom(2), "big")
    colour = colour or (n * 37 % 256, n // 7 % 256, n * 101 % 256)
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()


def image(data: bytes | None = None) -> str:
    """A data URL."""
    return "data:image/png;base64," + base64.b64encode(data or png()).decode()


def part(uuid: str | None = None, url: str | None = None) -> dict[str, Any]:
    """An image part."""
    made: dict[str, Any] = {"type": "image_url", "image_url": {"url": url or image()}}
    return made | ({"uuid": uuid} if uuid is not None else {})


def text(words: str = "Describe it.") -> dict[str, str]:
    """A text part."""
    return {"type": "text", "text": words}


def metric(server: Server, name: str, *labels: str) -> float:
    """One sample of /metrics."""
    lines = get(server, "/metrics").body.decode().splitlines()
    found = [
        line
        for line in lines
        if line.partition("{")[0].partition(" ")[0] == name and all(x in line for x in labels)
    ]
    assert len(found) == 1, (name, found)
    return float(found[0].rsplit(" ", 1)[1])


def open_stream(server: Server, payload: dict[str, Any]) -> socket.socket:
    """Send a request on a raw socket, and leave it open."""
    data = json.dumps(payload).encode()
    kind = "Content-Type: application/json"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(head.encode() + data)
    return connection

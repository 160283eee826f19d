"""One question to the daemon without an event loop: importing asyncio takes longer than the answer."""

import socket
import time
from pathlib import Path

import msgspec

from eccon.model import ClusterState

__all__ = ["ask", "state"]

ANSWER_MAX = 64 * 2**20


def ask(socket_path: Path, path: str, within_s: float) -> tuple[int, bytes] | None:
    """Status and body of a GET; None when nothing whole came within that many seconds.

    Raises:
        OSError: nobody answers on the socket.
    """
    end = time.monotonic() + within_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(within_s)
        s.connect(str(socket_path))
        s.sendall(f"GET {path} HTTP/1.1\r\nhost: eccon\r\nconnection: close\r\n\r\n".encode())
        data = bytearray()
        while len(data) < ANSWER_MAX:
            s.settimeout(max(end - time.monotonic(), 0.001))
            try:
                piece = s.recv(1 << 18)
            except TimeoutError:
                return None
            if not piece:
                break
            data += piece
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").lower().split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[1].isdecimal():
        return None
    fields = dict(line.split(": ", 1) for line in lines if ": " in line)
    if fields.get("content-length", "") != str(len(body)):
        return None
    return int(words[1]), body


def state(socket_path: Path, within_s: float) -> ClusterState | None:
    """The daemon's state; None when there is none to be had so quickly."""
    try:
        answer = ask(socket_path, "/v1/state", within_s)
        if answer is None or answer[0] != 200:
            return None
        return msgspec.json.decode(answer[1], type=ClusterState)
    except (OSError, msgspec.MsgspecError):
        return None

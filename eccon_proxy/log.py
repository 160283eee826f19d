"""One structured line a request, and what the proxy has to say of itself, on stderr.

Lines are written in batches by the loop, so that a slow reader of the pipe costs no request anything
but what fits in one write. Bodies, keys and base64 never come here.
"""

import logging
import sys
import time
from typing import Any, Literal

import msgspec

from eccon_proxy.trace import Recorder

__all__ = ["RequestLog", "configure", "logger"]

logger = logging.getLogger("eccon_proxy")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": round(record.created, 6), "level": record.levelname.lower(), "message": record.getMessage(),
        }  # fmt: skip
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure(log_format: Literal["json", "text"], level: str) -> None:
    """Send our own lines and uvicorn's to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Json() if log_format == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    for name in ("eccon_proxy", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.propagate = False
        log.setLevel(level.upper() if name == "eccon_proxy" else "WARNING")


class RequestLog:
    """Writes the line of each finished request."""

    def __init__(self, log_format: Literal["json", "text"]) -> None:
        self._json = log_format == "json"
        self._lines: list[str] = []
        self._second = (0, "")
        """The clock's last second, and how it is written: that costs more than the rest of a line."""

    @property
    def waiting(self) -> bool:
        """Whether lines wait for `flush`."""
        return bool(self._lines)

    def add(self, r: Recorder) -> None:
        """Note a finished request."""
        total = 1000 * (r.total or 0.0)
        ttft = None if r.first_byte is None else round(1000 * (r.first_byte - r.start), 1)
        if self._json:
            line: dict[str, Any] = {
                "ts": round(time.time(), 6), "level": "info", "request": r.id, "route": r.route,
                "model": r.model, "status": r.status, "outcome": r.outcome, "items": r.items,
                "stream": r.stream, "ttft_ms": ttft, "total_ms": round(total, 1),
            }  # fmt: skip
            if r.error:
                line["error"] = r.error
            self._lines.append(msgspec.json.encode(line).decode() + "\n")
            return
        now = int(time.time())
        if now != self._second[0]:
            self._second = (now, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)))
        error = " error=" + msgspec.json.encode(r.error).decode() if r.error else ""
        self._lines.append(
            f"{self._second[1]} {r.id} {r.route} {r.status} {r.outcome} items={r.items} "
            f"ttft={'-' if ttft is None else ttft}ms total={total:.1f}ms{error}\n"
        )

    def flush(self) -> None:
        """Write what waits."""
        lines, self._lines = self._lines, []
        sys.stderr.write("".join(lines))
        sys.stderr.flush()

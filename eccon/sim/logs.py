"""Logging as vLLM does it: default formats, VLLM_LOGGING_CONFIG_PATH, each process's prefix on every line."""

import json
import logging
import os
import sys
from logging.config import dictConfig
from pathlib import Path
from typing import Any, TextIO

from eccon.sim.release import release

__all__ = ["CONNECTOR", "LogError", "configure", "prefix", "uvicorn_config"]

CONNECTOR = "vllm_rbln.distributed.ec_transfer.ec_connector.rbln_ec_nixl_connector"
_DATE = "%m-%d %H:%M:%S"
_LINE = "%(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] %(message)s"
_NAMED = "(%(vllm_process_name)s pid=%(process)d) "


class LogError(Exception):
    """The logging configuration cannot be used; the message is vLLM's."""


class NewLineFormatter(logging.Formatter):
    """Repeats the head of a record on each of its lines.

    `fileinfo` is the file that logs in vLLM: a logger is named after its module there.
    """

    def format(self, record: logging.LogRecord) -> str:
        record.fileinfo = record.name.rsplit(".", 1)[-1] + ".py"
        text = super().format(record)
        head, _, _ = text.partition(record.getMessage()) if record.message else (text, "", "")
        return text.replace("\n", "\n" + head)


class _Prefixed:
    """A stream that begins each line with the process's name."""

    def __init__(self, stream: TextIO, text: str) -> None:
        self._stream = stream
        self._prefix = text
        self._at_start = True

    def write(self, text: str) -> int:
        if not text:
            return 0
        lines = text.split("\n")
        out = self._prefix + lines[0] if self._at_start and (lines[0] or len(lines) > 1) else lines[0]
        for line in lines[1:-1]:
            out += "\n" + self._prefix + line
        if len(lines) > 1:
            out += "\n" + (self._prefix + lines[-1] if lines[-1] else "")
        self._at_start = text.endswith("\n")
        self._stream.write(out)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_streams = (sys.stdout, sys.stderr)
_record = logging.getLogRecordFactory()


def prefix(name: str) -> None:
    """From now on what this process writes begins with `(name pid=N) `, or what it logs knows its name."""
    if release().marks_streams:
        text = f"({name} pid={os.getpid()}) "
        sys.stdout, sys.stderr = (_Prefixed(s, text) for s in _streams)
        return

    def named(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = _record(*args, **kwargs)
        record.vllm_process_name = name
        return record

    logging.setLogRecordFactory(named)


def _given() -> dict[str, Any] | None:
    path = os.environ.get("VLLM_LOGGING_CONFIG_PATH")
    if not path:
        return None
    if not Path(path).exists():
        msg = f"RuntimeError: Could not load logging config. File does not exist: {path}"
        raise LogError(msg)
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as e:
        msg = f"json.decoder.JSONDecodeError: {e}"
        raise LogError(msg) from e
    if not isinstance(config, dict):
        msg = f"ValueError: Invalid logging config. Expected dict, got {type(config).__name__}."
        raise LogError(msg)
    for formatter in config.get("formatters", {}).values():
        if str(formatter.get("class", "")).startswith("vllm."):  # vLLM's own formatters; ours does their work
            formatter["class"] = f"{__name__}.NewLineFormatter"
    return config


def _default() -> dict[str, Any]:
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    stream = os.environ.get("VLLM_LOGGING_STREAM", "ext://sys.stdout")
    line = _LINE if release().marks_streams else _NAMED + _LINE
    loggers = {"vllm": line, "vllm_rbln": "[vllm-rbln] " + _LINE}
    formatter = {"class": f"{__name__}.NewLineFormatter", "datefmt": _DATE}
    handler = {"class": "logging.StreamHandler", "level": level, "stream": stream}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {name: formatter | {"format": text} for name, text in loggers.items()},
        "handlers": {name: handler | {"formatter": name} for name in loggers},
        "loggers": {name: {"handlers": [name], "level": level, "propagate": False} for name in loggers},
    }


def configure() -> None:
    """Set logging up, in each process anew, after `prefix`: handlers hold on to their stream.

    Raises:
        LogError: VLLM_LOGGING_CONFIG_PATH cannot be used.
    """
    try:
        dictConfig(_given() or _default())
    except (ValueError, TypeError, AttributeError, ImportError) as e:
        msg = f"ValueError: {e}"
        raise LogError(msg) from e


def uvicorn_config() -> dict[str, Any] | None:
    """vLLM hands the same file to uvicorn: loggers of uvicorn that are not in it fall silent."""
    return _given()

"""Recordings of a cluster: the event stream as lines of JSON, for post-mortems, reports of faults, and tests.

The first line says what the file is; each further line is a state or a change, and when it came.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from eccon.model import Change, ClusterState

__all__ = ["FORMAT", "Record", "Recorder", "RecordingError", "read"]

FORMAT = 1
LINE_MAX = 256 * 2**20


class RecordingError(Exception):
    """The file is no recording, or a damaged one; the message names file and line."""


class _Head(msgspec.Struct):
    eccon_recording: int
    at: float


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came at a Unix time: a whole state or a change of it."""

    at: float
    state: ClusterState | None = None
    change: Change | None = None

    @property
    def item(self) -> ClusterState | Change:
        """The one that came."""
        item = self.state if self.state is not None else self.change
        assert item is not None  # noqa: S101  `read` lets no other pass
        return item


class Recorder:
    """Writes a recording; used as a context. Only the owner may read the file: requests may be private.

    Raises:
        OSError: the file cannot be written; an existing one is never overwritten.
    """

    def __init__(self, path: Path) -> None:
        self.records = 0
        self.bytes = 0
        self._encode = msgspec.json.Encoder().encode
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self._write(self._encode(_Head(FORMAT, time.time())))

    def __enter__(self) -> "Recorder":  # noqa: PYI034  Self is 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def take(self, item: ClusterState | Change, at: float | None = None) -> None:
        """Notes what came, now or at the Unix time given."""
        at = time.time() if at is None else at
        record = Record(at, state=item) if isinstance(item, ClusterState) else Record(at, change=item)
        self._write(self._encode(record))
        self.records += 1

    def _write(self, line: bytes) -> None:
        self.bytes += self._file.write(line + b"\n")
        self._file.flush()


def read(path: Path) -> Iterator[Record]:
    """The records of a file, one after the other: a long one is not held in memory.

    A last line that was cut, by a crash or a full disk, is left out.

    Raises:
        RecordingError: it is no recording; or a line before the last cannot be read.
    """
    decode = msgspec.json.Decoder(Record).decode
    try:
        with path.open("rb") as file:
            _check(path, file.readline(LINE_MAX))
            for number, line in enumerate(file, 2):
                try:
                    record = decode(line)
                except msgspec.MsgspecError as e:
                    if not line.endswith(b"\n"):
                        return
                    msg = f"{path}:{number}: {e}"
                    raise RecordingError(msg) from e
                if record.state is not None or record.change is not None:
                    yield record
    except OSError as e:
        msg = f"{path}: {e.strerror}"
        raise RecordingError(msg) from e


def _check(path: Path, line: bytes) -> None:
    try:
        head = msgspec.json.decode(line, type=_Head)
    except msgspec.MsgspecError as e:
        msg = f"{path}: no recording of eccon"
        raise RecordingError(msg) from e
    if head.eccon_recording > FORMAT:
        msg = f"{path}: of a newer eccon (format {head.eccon_recording}, this one reads {FORMAT})"
        raise RecordingError(msg)

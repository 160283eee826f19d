"""Looks over an event stream as it passes, without holding or changing it."""

import re

from eccon_proxy.guard import placeholder

__all__ = ["StreamTap", "before_end", "error_event", "tokens"]

CAP = 64 * 1024
"""Bytes of an unfinished event that are looked at; of a longer one only the beginning."""
TAIL = 4096
END = b"data: [DONE]"
_USAGE = re.compile(rb'"(prompt|completion)_tokens"\s*:\s*(\d{1,12})')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_ERROR = re.compile(rb'(?:^|[\r\n])data:\s*\{\s*"error"\s*:\s*(?!null)')


class StreamTap:
    """Notes an error event, and the last read that tells usage: it may come some events before the end."""

    __slots__ = ("_finished", "_open", "_usage", "_watch_end", "error", "spoilt")

    def __init__(self, *, watch_end: bool = False) -> None:
        self._watch_end = watch_end
        self._finished = False
        self._open = b""
        """The beginning of an event whose end has not come."""
        self._usage = b""
        self.error = ""
        self.spoilt = ""
        """With a guarded PD: what is wrong with this read, which the PD itself does not say."""

    def feed(self, data: bytes) -> None:
        """Look at the next bytes."""
        if self._open:
            data = self._open + data
        if data.endswith(b"\n\n"):
            self._open = b""
        else:
            end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
            self._open = data[end if end > 3 else 0 :][:CAP]
        if b'"error"' in data and (m := _ERROR.search(data)):
            self.error = data[m.start() : m.start() + 500].strip().decode("utf-8", "replace")
        if b'"usage"' in data:
            self._usage = data
        if self._watch_end and not self.error:
            self._look_for_end(data)

    def _look_for_end(self, data: bytes) -> None:
        """With a guarded PD: an end without a reason is a failure, and so are zeros in place of an item."""
        self._finished = self._finished or _FINISH.search(data) is not None
        if placeholder(data):
            self.spoilt = "The PD answered with zeros in place of an item"
        elif not self._finished and END in data:
            self.spoilt = "The PD ended the stream without a finish_reason"
        self.error = self.spoilt

    def usage(self) -> dict[bytes, int]:
        """Prompt and completion tokens, if the stream said them."""
        return tokens(self._usage)


def tokens(body: bytes) -> dict[bytes, int]:
    """Token counts in the last bytes of an answer, by `prompt` and `completion`."""
    return {m.group(1): int(m.group(2)) for m in _USAGE.finditer(body[-TAIL:])}


def before_end(data: bytes, event: bytes) -> bytes:
    """A read of a stream with an event of ours before its `[DONE]`, or after it all when it has none."""
    at = data.rfind(END)
    return data + event if at < 0 else data[:at] + event + data[at:]


def error_event(error: bytes) -> bytes:
    """An error object as the last event of a stream; a blank line first ends what was cut."""
    return b"\n\ndata: %b\n\n" % error

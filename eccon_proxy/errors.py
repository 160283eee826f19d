"""Every error that the proxy says itself, in OpenAI's shape.

The shape is `{"error": {"message", "type", "param", "code"}}`, as `application/json`. `code` tells a
busy proxy (`busy`: try again) from a PD or encoders that are down (`pd_down`, `encoders_down`).
"""

import math
from typing import Any

import msgspec

__all__ = ["Failure", "bad_request", "busy", "down", "error_body", "upstream"]

Header = tuple[bytes, bytes]
JSON: Header = (b"content-type", b"application/json")


class Failure(Exception):  # noqa: N818  it is an answer, not a fault of ours
    """A request that ends with an error of ours; carries the whole answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        code: str | int | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: tuple[Header, ...] = (),
        body: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = status if code is None else code
        self.param = param
        self.extra = headers
        self.retry_after = retry_after
        self._body = body
        """A whole body of an upstream's error, relayed as it is."""

    @property
    def body(self) -> bytes:
        """The JSON of the answer."""
        if self._body is not None:
            return self._body
        return error_body(self.message, self.kind, self.code, self.param)

    @property
    def headers(self) -> list[Header]:
        """Headers of the answer but for its length."""
        found = [] if any(name == b"content-type" for name, _ in self.extra) else [JSON]
        found += self.extra
        if self.retry_after is not None:
            found.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after))))
        return found


def error_body(message: str, kind: str, code: str | int | None, param: str | None = None) -> bytes:
    """One error object in OpenAI's shape, as JSON."""
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def bad_request(message: str, *, param: str | None = None, code: str | int | None = None) -> Failure:
    """400: the client's own fault, never worth a retry."""
    return Failure(400, message, kind="invalid_request_error", param=param, code=code)


def busy(message: str, *, retry_after: float = 1.0, status: int = 503) -> Failure:
    """No room now: worth a retry soon."""
    return Failure(status, message, kind="overloaded_error", code="busy", retry_after=retry_after)


def down(message: str, *, code: str, retry_after: float = 5.0) -> Failure:
    """Something behind the proxy is away."""
    return Failure(503, message, kind="service_unavailable_error", code=code, retry_after=retry_after)


def upstream(message: str, *, status: int = 502, code: str | int | None = None) -> Failure:
    """An upstream that broke its answer or did not give one in time."""
    kind = "timeout_error" if status == 504 else "upstream_error"
    return Failure(status, message, kind=kind, code=status if code is None else code)

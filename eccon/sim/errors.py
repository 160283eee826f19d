"""Answers that are not 200, in vLLM's shapes (taken from vLLM 0.30 on CPU)."""

import json
from typing import Any

__all__ = ["DEAD", "ApiError", "LostError", "bad_request", "dead", "invalid", "not_found"]

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class ApiError(Exception):
    """Becomes `{"error": {message, type, param, code}}` with `status`."""

    def __init__(
        self, message: str, *, status: int = 400, type_: str = "BadRequestError", param: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.error: dict[str, Any] = {"message": message, "type": type_, "param": param, "code": status}

    def body(self) -> bytes:
        """As a whole answer."""
        return json.dumps({"error": self.error}, ensure_ascii=False, separators=(",", ":")).encode()

    def event(self) -> bytes:
        """As an event of a stream that has begun: vLLM writes these with blanks."""
        return f"data: {json.dumps({'error': self.error})}\n\n".encode()


class LostError(ApiError):
    """A request that a guarded PD has failed: a stream of it shows nothing of that."""


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400 with vLLM's usual type."""
    return ApiError(message, param=param)


def invalid(kind: str, loc: str, msg: str, value: str, **more: Any) -> ApiError:
    """400 of a body that does not fit the schema: FastAPI's error list as vLLM 0.30 writes it."""
    entry: dict[str, Any] = {"type": kind, "loc": loc, "msg": msg, "input": value, **more}
    return ApiError(f"1 validation error:\n  {entry}", type_="Bad Request", param=loc)


def not_found(message: str, param: str) -> ApiError:
    """404 of a model that is not served."""
    return ApiError(message, status=404, type_="NotFoundError", param=param)


def dead() -> ApiError:
    """500 once the engine has died, for everybody."""
    return ApiError(DEAD, status=500, type_="InternalServerError")

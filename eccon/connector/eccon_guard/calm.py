"""Hooks run inside the engine, where an exception is its end: what fails is logged and answered mildly."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .log import logger

__all__ = ["calm"]

Hook = TypeVar("Hook", bound=Callable[..., Any])


def calm(default: Callable[[], object]) -> Callable[[Hook], Hook]:
    """Make a hook return `default()` in place of raising. Each distinct failure is logged once a hook."""

    def wrap(hook: Hook) -> Hook:
        told: set[str] = set()

        @functools.wraps(hook)
        def guarded(*args: object, **kwargs: object) -> object:
            try:
                return hook(*args, **kwargs)
            except Exception as e:  # noqa: BLE001  see above
                mark = f"{type(e).__name__}: {e}"
                if mark not in told and len(told) < 100:
                    told.add(mark)
                    logger.exception("EC guard: %s failed; the engine goes on", hook.__name__)
                return default()

        return cast(Hook, guarded)

    return wrap

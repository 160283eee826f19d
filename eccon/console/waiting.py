"""Waiting for a condition of the state."""

import asyncio
import time
from collections.abc import Callable

__all__ = ["until"]


async def until(there: Callable[[], bool], seconds: float, step: float = 0.2) -> bool:
    """Whether `there()` became true in time."""
    end = time.monotonic() + seconds
    while not there():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(step)
    return True

"""Waits for an event for some time; `asyncio.wait_for` may lose a cancellation that comes with the event."""

import asyncio

__all__ = ["happened"]


async def happened(event: asyncio.Event, timeout: float | None) -> bool:
    """Whether the event was set within `timeout` seconds (None: however long it takes)."""
    if event.is_set():
        return True
    waiter = asyncio.ensure_future(event.wait())
    try:
        done, _ = await asyncio.wait({waiter}, timeout=None if timeout is None else max(0.0, timeout))
        return bool(done)
    finally:
        waiter.cancel()

"""Runs the proxy: sockets, loop, signals, the way from SIGTERM to exit."""

import asyncio
import ctypes
import gc
import resource
import signal
import socket
import ssl

import uvloop

from eccon_proxy.admin import admin_app
from eccon_proxy.app import public_app
from eccon_proxy.core import Core
from eccon_proxy.descriptors import fitted
from eccon_proxy.drain import Drains
from eccon_proxy.errors import Failure
from eccon_proxy.listener import Listener
from eccon_proxy.log import configure, logger
from eccon_proxy.reload import reload
from eccon_proxy.settings import Settings
from eccon_proxy.sockets import admin_socket, public_socket
from eccon_proxy.tls import client_context, server_context

__all__ = ["run"]

M_MMAP_THRESHOLD = -3
M_TRIM_THRESHOLD = -1
CUT_SECONDS = 2.0


def run(settings: Settings) -> int:
    """Serve until a signal; the exit code."""
    configure(settings.log_format, settings.log_level)
    settings = _fit(settings, _tune())
    tls = server_context(settings)
    if settings.upstream_ca:
        client_context(settings.upstream_ca)  # a file that is none ends it here, not a later join
    public = public_socket(settings)
    try:
        admin, path = admin_socket(settings)
    except BaseException:
        public.close()
        raise
    try:
        uvloop.run(_serve(settings, public, admin, tls))
    finally:
        public.close()
        admin.close()
        if path is not None:
            path.unlink(missing_ok=True)
    return 0


def _fit(settings: Settings, limit: int) -> Settings:
    found = fitted(settings, limit)
    for name in ("max_inflight", "max_connections"):
        wanted, fits = getattr(settings, name), getattr(found, name)
        if fits < wanted:
            logger.info("open files: %d, so %s is %d, not %d", limit, name, fits, wanted)
    return found


def _tune() -> int:
    """Prepare the process; how many files it may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        logger.info("open files: limit raised from %d to %d", soft, hard)
    # Bodies of megabytes are mapped and so given back at once; glibc would keep them.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 256 * 1024)
        libc.mallopt(M_TRIM_THRESHOLD, 1024 * 1024)
    # What is loaded now stays; looking through it at every collection is wasted.
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 20, 50)
    return hard if hard != resource.RLIM_INFINITY else 2**20


async def _serve(
    settings: Settings, public: socket.socket, admin: socket.socket, tls: ssl.SSLContext | None
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    force = asyncio.Event()

    def on_signal() -> None:
        (force if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    core = Core(settings, public.getsockname())
    drains = Drains(core)
    loop.add_signal_handler(signal.SIGHUP, reload, core, drains)
    await core.start()
    outside = Listener(public_app(core), public, settings, tls=tls)
    inside = Listener(admin_app(core, drains), admin, settings)
    await inside.start()
    await outside.start()
    where = admin.getsockname()
    logger.info("listening on %s:%d, admin on %s", *public.getsockname()[:2], where)
    await stop.wait()
    logger.info("ending: %d requests under way", len(core.exchanges))
    core.begin_drain()
    await _either(force, settings.drain_delay)
    outside.stop_accepting()
    await _quiet(core, outside, force, settings.shutdown_grace)
    core.stop_requests(
        Failure(503, "The proxy is shutting down", kind="service_unavailable_error", code="shutdown")
    )
    await outside.finish(0.0 if force.is_set() else CUT_SECONDS)
    await drains.close()
    core.feed.end()
    await inside.finish(0.0 if force.is_set() else 0.5)
    await core.close(hurry=force.is_set())
    logger.info("ended")


async def _either(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return


async def _quiet(core: Core, listener: Listener, force: asyncio.Event, grace: float) -> None:
    """Wait for the requests under way, at most `grace` seconds."""
    loop = asyncio.get_running_loop()
    until = loop.time() + grace
    while (core.exchanges or listener.connections) and not force.is_set() and loop.time() < until:
        await _either(force, min(0.05, max(0.0, until - loop.time())))

"""The API server's process: socket, engine's process, HTTP, and the ways in which it all ends."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Generator
from types import FrameType
from typing import NoReturn

from eccon.sim import engine, logs, milestones
from eccon.sim.client import EngineClient
from eccon.sim.faults import Faults
from eccon.sim.flags import Serve
from eccon.sim.modeldir import Model
from eccon.sim.tunables import Tunables

__all__ = ["bind", "run"]

log = logging.getLogger("vllm.entrypoints.launchers.launcher")
client_log = logging.getLogger("vllm.v1.engine.core_client")

STOP_GRACE_S = 1.0
"""From SIGTERM to SIGKILL for an engine that is in the middle of a step."""
AFTER_FAILURE_S = 1.5
"""From the first request that failed of a dead engine to the server's exit."""
AFTER_DEATH_S = 3.5
"""The same where nobody asks: vLLM looks every 5 s; 3.6 to 4.3 s were seen."""


def bind(serve: Serve) -> socket.socket:
    """Bound, not listening: the port is taken at once, and refuses until the engine is ready.

    Raises:
        OSError: somebody without SO_REUSEPORT has the port.
    """
    host = serve.host or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, serve.port))
    except OSError:
        sock.close()
        raise
    return sock


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def run(serve: Serve, model: Model, tunables: Tunables, sock: socket.socket) -> int:
    """Serve until told to stop, or until the engine dies; returns the exit code, which is 0 for either."""
    faults = Faults()
    slots = tunables.batch or serve.max_num_seqs or model.batch
    ours, theirs = socket.socketpair()
    pid = engine.fork(theirs, [sock, ours], serve, model, tunables, faults, slots)
    theirs.close()
    client = EngineClient(ours, pid)
    if not faults.named("ignore-term"):
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        import uvicorn  # noqa: PLC0415, F401  while the engine loads, and after the fork: it needs none of it

        ready = client.wait_ready()
    except KeyboardInterrupt:
        client.stop(0.2)
        return 130
    if not ready:
        client.stop(STOP_GRACE_S)
        log.error(
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): %s",
            {"EngineCore": client.reap()},
        )
        return 1
    milestones.serving(serve.host or "0.0.0.0", serve.port)
    milestones.routes()
    try:
        asyncio.run(_serve(serve, model, tunables, sock, client, faults))
    finally:
        client.stop(STOP_GRACE_S)
    return 0


async def _serve(
    serve: Serve, model: Model, tunables: Tunables, sock: socket.socket, client: EngineClient, faults: Faults
) -> None:
    import uvicorn  # noqa: PLC0415
    import uvicorn.config  # noqa: PLC0415

    from eccon.sim.api import Api  # noqa: PLC0415

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            yield  # ours are set below

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    exit_delay = 0.0

    def after(seconds: float) -> None:
        """The engine is dead: no more connections, and the process ends a while later."""
        nonlocal exit_delay
        exit_delay = exit_delay or tunables.scaled(seconds)
        server.should_exit = True

    app = Api(serve, model, client, faults, on_failure=lambda: after(AFTER_FAILURE_S))
    config = uvicorn.Config(
        app,
        host=serve.host or "0.0.0.0",
        port=serve.port,
        log_level=serve.uvicorn_log_level,
        access_log=serve.access_log,
        timeout_keep_alive=int(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5")),
        ws="none",
        interface="asgi3",
        log_config=logs.uvicorn_config() or uvicorn.config.LOGGING_CONFIG,
    )
    server = Server(config)

    def on_death() -> None:
        if not stop.is_set():
            client_log.error("[shutdown] MPClient: engine core exited unexpectedly; starting cleanup")
        loop.call_later(tunables.scaled(AFTER_DEATH_S), after, 0.0)

    client.on_death = on_death

    def on_signal() -> None:
        if not faults.take("ignore-term"):
            log.info("[shutdown] API server: shutdown triggered")
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        log.info("[shutdown] API server: stopping engine client mode=%s timeout=%ss", "abort", 0)
        if not await asyncio.to_thread(client.stop, STOP_GRACE_S):
            log.warning("[shutdown] Process manager: force killing remaining processes count=%d", 1)
        log.info("[shutdown] API server: engine client stopped")
        server.should_exit = True
    await serving
    stopping.cancel()
    if exit_delay:
        await asyncio.sleep(exit_delay)
    sys.stdout.flush()

"""Renders the console on a running demo to SVG and PNG: `python screenshots/make.py [DIRECTORY]`.

Starts the demo's cluster (six encoders) in a temporary directory, sends it requests with the sample
images, stops an encoder's engine so that there is something to see, draws each screen without a
terminal, and takes everything down again. Needs the `test` extra (cairosvg) and a monospace font.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import cairosvg
import psutil

from eccon import prompt, scaffold
from eccon.client import Client, ControlError, NotRunning
from eccon.console.app import ConsoleApp
from eccon.model import ClusterState, Role, State
from eccon.supervisor import start_daemon

HERE = Path(__file__).parent
FONT = "DejaVu Sans Mono"
ENCODERS = 6
TEXT = "Briefly describe each of these images."

Press = Callable[..., Awaitable[None]]


def save(directory: Path, name: str, svg: str) -> None:
    """Writes an SVG whose font is installed instead of fetched, and the same as PNG."""
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", FONT)
    (directory / f"{name}.svg").write_text(svg, encoding="utf-8")
    cairosvg.svg2png(bytestring=svg.encode(), write_to=str(directory / f"{name}.png"))


async def until(client: Client, there: Callable[[ClusterState], bool], seconds: float = 120.0) -> None:
    """Waits for a condition of the cluster."""
    end = time.monotonic() + seconds
    while not there(await client.state()):
        if time.monotonic() > end:
            msg = "the demo did not come so far"
            raise TimeoutError(msg)
        await asyncio.sleep(0.2)


def all_ready(state: ClusterState) -> bool:
    """Whether all of the cluster serves."""
    encoders = [p for p in state.processes if p.role is Role.ENCODER]
    trusted = all(p.encoder is not None and p.encoder.state == "ready" for p in encoders)
    return trusted and all(p.state is State.READY for p in state.processes)


async def load(client: Client, model: str) -> None:
    """Sends requests with one to eight images, two at a time, until cancelled."""
    paths = [str(p) for p in prompt.samples()]

    async def lane(n: int) -> None:
        while True:
            n += 3
            images = paths[: n % 8 + 1]
            body = prompt.build(model, TEXT, images, stream=True)
            with contextlib.suppress(ControlError):
                async for _ in client.prompt(body):
                    pass

    await asyncio.gather(lane(0), lane(4))


async def shots(
    directory: Path, socket: Path, size: tuple[int, int], theme: str, plan: dict[str, list[str]]
) -> None:
    """Draws the screens of `plan`: name of the picture → keys that lead there from the overview."""
    app = ConsoleApp(socket, theme=theme, environ={})
    async with app.run_test(size=size) as pilot:
        while not app.state.processes:
            await pilot.pause(0.1)
        await pilot.pause(1.5)
        for name, keys in plan.items():
            for key in keys:
                if key.startswith("wait:"):
                    await pilot.pause(float(key[5:]))
                else:
                    await pilot.press(key)
                    await pilot.pause(0.3)
            app.redraw()
            await pilot.pause(0.2)
            save(directory, f"{name}-{size[0]}x{size[1]}", app.export_screenshot(title="eccon"))
            while len(app.screen_stack) > 1:
                await pilot.press("escape")
                await pilot.pause(0.2)


async def tell(directory: Path, socket: Path) -> None:
    """The whole story: calm, busy, one request, an encoder that hangs."""
    async with Client(socket) as client:
        await client.up()
        await until(client, all_ready)
        model = (await client.state()).cluster.model
        working = asyncio.create_task(load(client, model))
        try:
            wide = {
                "overview": ["w", "w", "wait:50"],
                "prompt": ["p", "enter", "wait:6"],
                "waterfall": ["t", "wait:1", "down", "down", "down", "enter"],
                "encoder": ["down", "down", "enter", "wait:1"],
                "logs": ["l", "wait:2"],
            }
            await shots(directory, socket, (160, 45), "eccon-dark", wide)
            await shots(
                directory, socket, (120, 36), "eccon-light", {"overview-light": ["w", "w", "wait:30"]}
            )
            await shots(
                directory, socket, (80, 24), "eccon-dark", {"overview": ["wait:2"], "traces": ["t", "wait:1"]}
            )
            victim = (await client.state()).process("encoder-2")
            assert victim is not None  # noqa: S101  the demo has it
            engine = psutil.Process(victim.pid).children()[-1]
            engine.send_signal(signal.SIGSTOP)
            await until(client, lambda s: bool(s.alarms))
            await shots(
                directory,
                socket,
                (120, 36),
                "eccon-dark",
                {"trouble": ["wait:1"], "question": ["exclamation_mark", "r", "wait:1"]},
            )
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.send_signal(signal.SIGCONT)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def end(socket: Path) -> None:
    """Stops the cluster and its daemon; returns when the daemon is gone."""
    with contextlib.suppress(NotRunning):
        async with Client(socket) as client:
            await client.shutdown()
            async for _ in client.changes():
                pass


def main() -> None:
    """Makes all pictures."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    with tempfile.TemporaryDirectory(prefix="eccon-shots-") as home:
        os.environ["ECCON_STATE_DIR"] = str(Path(home) / "state")
        os.environ["HOME"] = home
        path = scaffold.demo(Path(home), name="demo", encoders=ENCODERS, ports=scaffold.free_ports(ENCODERS))
        paths = start_daemon(path, linger_s=120.0)
        try:
            asyncio.run(tell(directory, paths.control_socket))
        finally:
            asyncio.run(end(paths.control_socket))
            with paths.lock.open("rb") as lock:  # held to the daemon's last word, and it writes below `home`
                fcntl.flock(lock, fcntl.LOCK_EX)


if __name__ == "__main__":
    main()

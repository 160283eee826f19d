"""Opening the console: on the cluster at hand, or on a control socket."""

import os
import sys
from pathlib import Path

import click

from eccon import config, console, peek
from eccon.cli.common import NOT_RUNNING, USAGE, config_option, control_socket, guarded, narrate
from eccon.paths import PathsError

__all__ = ["attach", "open_at_hand", "open_console"]

ANSWER_S = 30.0


def open_console(
    socket: Path, *, on_quit_ask: bool = True, read_only: bool = False, theme: str | None = None
) -> int:
    """Draws until the user leaves; the exit code. A terminal that cannot show it is refused with 2."""
    if reason := console.refuse_reason():
        narrate(f"eccon: {reason}")
        return USAGE
    return console.run(socket, on_quit_ask=on_quit_ask, read_only=read_only, theme=theme)


def open_at_hand(file: str | None, *, read_only: bool, theme: str | None) -> int:
    """`eccon` without a command: attaches to the cluster of the configuration, and offers to start it.

    Where there is no configuration it shows what there is instead, and what can be made of it.
    """
    unnamed = file is None and not os.environ.get("ECCON_CONFIG")
    if unnamed and not Path("eccon.toml").exists() and console.refuse_reason() is None:
        return _first_run(read_only=read_only, theme=theme)
    try:
        path = config.find(file)
        socket = control_socket(str(path))
    except (config.ConfigError, PathsError) as e:
        narrate(f"eccon: {e}")
        return USAGE
    if not _answers(socket):
        if console.refuse_reason():
            narrate(f"eccon: {config.cluster_name(path)} is not running; `eccon up` starts it")
            return NOT_RUNNING
        if not click.confirm(
            f"{config.cluster_name(path)} is not running. Start it?", default=True, err=True
        ):
            return 0
        import asyncio  # noqa: PLC0415  not before the console has drawn

        from eccon.cli.cluster import bring_up  # noqa: PLC0415  loads the launcher, which opening does not need

        if code := guarded(lambda: asyncio.run(bring_up(str(path), detach=True))):
            return code
    return open_console(socket, read_only=read_only, theme=theme)


def _first_run(*, read_only: bool, theme: str | None) -> int:
    from eccon import discovery, running, scaffold  # noqa: PLC0415  only here is looked around
    from eccon.console.welcome import welcome  # noqa: PLC0415  only here is drawn

    findings = discovery.look(Path.cwd())
    choice, code = welcome(findings, theme)
    what, _, value = choice.partition(":")
    if what == "demo":
        options = ["--theme", theme] if theme else []
        os.execv(sys.executable, [sys.executable, "-m", "eccon", "demo", *options])  # noqa: S606  no shell
    if what == "attach":
        return open_console(Path(value), read_only=read_only, theme=theme)
    if what == "file":
        return open_at_hand(str(Path(value).expanduser()), read_only=read_only, theme=theme)
    if what in ("init", "running"):
        name = discovery.cluster_name(Path.cwd().name)
        if what == "init":
            text = discovery.topology(findings, value or "Qwen3-VL-8B-Instruct", name)
        else:
            found = running.toml(running.groups(findings.servers)[int(value)], name=name)
            text = found.text
            for note in found.notes:
                narrate(f"note: {note}")
        try:
            path = scaffold.write(Path(), text)
        except OSError as e:
            narrate(f"eccon: eccon.toml: {e.strerror}")
            return USAGE
        narrate(f"{path.absolute()}: look it through; `eccon config check`, then `eccon up`")
    return code


def _answers(socket: Path) -> bool:
    """Whether a daemon is there; one that refuses is: the console says why."""
    try:
        return peek.ask(socket, "/v1/version", ANSWER_S) is not None
    except OSError:
        return False


@click.command()
@config_option
@click.option(
    "--socket", type=click.Path(path_type=Path), help="A daemon's control socket, e.g. forwarded by ssh -L."
)
@click.option(
    "--proxy",
    metavar="ADMIN",
    help="The admin API of a proxy that runs alone: unix:PATH or HOST:PORT. No process control.",
)
@click.option(
    "--admin-key", envvar="ECCON_PROXY_ADMIN_KEY", default="", help="Key of that admin API, where it has one."
)
@click.option("--read-only", is_flag=True, help="Look, and do not act.")
@click.option("--theme", metavar="NAME")
def attach(
    file: str | None,
    socket: Path | None,
    proxy: str | None,
    admin_key: str,
    read_only: bool,
    theme: str | None,
) -> None:
    """Open the console on a cluster that runs, here or through a forwarded socket; or on a proxy alone."""
    if proxy is not None:
        sys.exit(_attach_proxy(proxy, admin_key, read_only=read_only, theme=theme))
    try:
        where = socket or control_socket(file)
    except (config.ConfigError, PathsError) as e:
        narrate(f"eccon: {e}")
        sys.exit(USAGE)
    if not _answers(where):
        narrate(f"eccon: no daemon answers on {where}")
        sys.exit(NOT_RUNNING)
    sys.exit(open_console(where, read_only=read_only, theme=theme))


def _attach_proxy(admin: str, key: str, *, read_only: bool, theme: str | None) -> int:
    import asyncio  # noqa: PLC0415  only this command needs it, and what follows

    from eccon.client import Address  # noqa: PLC0415
    from eccon.console.proxysource import ProxySource  # noqa: PLC0415
    from eccon.console.source import Problem  # noqa: PLC0415

    address: Address = Path(admin.removeprefix("unix:"))
    if not admin.startswith("unix:"):
        host, _, port = admin.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            narrate(f"eccon: --proxy {admin!r}: neither unix:PATH nor HOST:PORT")
            return USAGE
        address = (host.strip("[]"), int(port))
    try:
        asyncio.run(ProxySource(address, key).probe())
    except Problem as e:
        narrate(f"eccon: {e}")
        return NOT_RUNNING
    if reason := console.refuse_reason():
        narrate(f"eccon: {reason}")
        return USAGE
    return console.run(
        Path(),
        on_quit_ask=False,
        read_only=read_only,
        theme=theme,
        source=lambda: ProxySource(address, key),
    )

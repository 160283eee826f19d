"""What the commands share: exit codes, the cluster at hand, errors as one line, following the state.

An event loop, and what needs one, is imported when a command runs on it: the console draws first.
"""

import functools
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import click

from eccon import config
from eccon.model import ClusterState
from eccon.paths import PathsError, for_cluster

if TYPE_CHECKING:
    from eccon.client import Client

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "NOT_RUNNING",
    "TIMED_OUT",
    "USAGE",
    "command",
    "config_option",
    "control_socket",
    "file_or_parents",
    "follow",
    "guarded",
    "long_config_option",
    "narrate",
    "plain",
    "plain_command",
]

FAILED = 1
USAGE = 2
NOT_RUNNING = 3
TIMED_OUT = 4
INTERRUPTED = 130

P = ParamSpec("P")


def narrate(text: str) -> None:
    """Says something about what is done. stdout is for what was asked."""
    click.echo("\n".join(map(plain, text.split("\n"))), err=True)


def plain(text: str) -> str:
    """Texts quote logs, errors and names of foreign processes: what could move a cursor is not printed."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def file_or_parents(ctx: click.Context, _: click.Parameter, value: str | None) -> str | None:
    """The file given here, else the one given before the command."""
    parent: str | None = ctx.obj
    return value or parent


def config_option(f: click.decorators.FC) -> click.decorators.FC:
    """`-f FILE`, here or before the command."""
    text = "eccon.toml; else ECCON_CONFIG, else ./eccon.toml."
    return click.option("-f", "--file", "file", metavar="FILE", callback=file_or_parents, help=text)(f)


def long_config_option(f: click.decorators.FC) -> click.decorators.FC:
    """`--file FILE`, for a command whose `-f` is `--follow`; before the command it is `-f FILE` as ever."""
    text = "eccon.toml, as elsewhere -f."
    return click.option("--file", "file", metavar="FILE", callback=file_or_parents, help=text)(f)


def command(f: Callable[P, Coroutine[Any, Any, int | None]]) -> Callable[P, None]:
    """Runs an async command; its result is the exit code, its known errors one line each."""

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        import asyncio  # noqa: PLC0415  as said above

        sys.exit(guarded(lambda: asyncio.run(f(*args, **kwargs))))

    return run


def plain_command(f: Callable[P, int | None]) -> Callable[P, None]:
    """The same for a command that needs no event loop."""

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        sys.exit(guarded(lambda: f(*args, **kwargs)))

    return run


def guarded(call: Callable[[], int | None]) -> int:
    """The exit code of `call`: its result, or that of the known error it raised, said in one line."""
    import asyncio  # noqa: PLC0415  as said above

    from eccon.client import ControlError, NotRunning  # noqa: PLC0415
    from eccon.supervisor import DaemonError  # noqa: PLC0415

    try:
        return call() or 0
    except (config.ConfigError, PathsError) as e:
        return _fail(str(e), USAGE)
    except NotRunning as e:
        return _fail(str(e), NOT_RUNNING)
    except (ControlError, DaemonError) as e:
        return _fail(str(e), FAILED)
    except (TimeoutError, asyncio.TimeoutError) as e:
        return _fail(str(e) or "time ran out", TIMED_OUT)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough (`eccon status | head -1`); the interpreter must not flush to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _fail(message: str, code: int) -> int:
    for line in message.splitlines():
        narrate(f"eccon: {line}")
    return code


def control_socket(file: str | None) -> Path:
    """The control socket of the cluster that the configuration at hand names."""
    return for_cluster(config.cluster_name(config.find(file)), create=False).control_socket


async def follow(client: "Client") -> AsyncIterator[ClusterState]:
    """The state, now and at each change."""
    state: ClusterState | None = None
    async for item in client.changes():
        state = item if isinstance(item, ClusterState) else state.apply(item) if state else None
        if state is not None:
            yield state

"""What holds for every command, without running one."""

from collections import Counter
from collections.abc import Iterator

import click
import pytest

from eccon.cli import COMMANDS, _main


def commands() -> Iterator[tuple[str, click.Command]]:
    """All of them with their names, those of groups included."""
    context = click.Context(_main)
    for name in COMMANDS:
        command = _main.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {below}", found) for below, found in command.commands.items())


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=lambda x: x if isinstance(x, str) else "")
def test_no_option_is_spelt_twice(name: str, command: click.Command) -> None:
    spellings = Counter(s for p in command.params for s in (*p.opts, *p.secondary_opts))
    assert [s for s, n in spellings.items() if n > 1] == [], name

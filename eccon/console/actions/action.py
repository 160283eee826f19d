"""What an action is, and the screens that it may be of."""

from typing import Literal

import msgspec

__all__ = ["PROCESS_SCREENS", "SCOPES", "Action"]

Target = Literal["", "process", "encoder", "trace"]

SCOPES = ("overview", "charts", "detail", "traces", "trace", "logs", "events")
"""Screens, by name. Dialogs have keys of their own: enter, escape, tab."""

PROCESS_SCREENS = ("overview", "detail", "logs")
"""Those on which a process is chosen."""


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do."""

    name: str
    keys: str
    """Textual's names of keys, separated by commas; the first is shown."""
    title: str
    tooltip: str
    scope: tuple[str, ...] = SCOPES
    target: Target = ""
    ask: bool = False
    """Names its target and what it costs, and defaults to No."""
    mutates: bool = False
    """Refused in a read-only console."""
    footer: int = 0
    """Its rank in the footer, 1 first; 0: not there."""
    command: str = ""
    """The same on the command line; empty for what only a screen needs."""

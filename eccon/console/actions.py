"""The one table of what a user can do: keys, footer, palette, help and documentation are made from it.

A handler is a method `act_NAME` of the screen, or of the app.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

__all__ = ["ACTIONS", "SCOPES", "Action", "by_name", "footer", "in_scope", "key_label"]

Target = Literal["", "process", "encoder", "trace"]

SCOPES = ("overview", "charts", "detail", "traces", "trace", "logs", "events")
"""Screens, by name. Dialogs have keys of their own: enter, escape, tab."""

_PROCESS = ("overview", "detail", "logs")
_MAIN = SCOPES


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do."""

    name: str
    keys: str
    """Textual's names of keys, separated by commas; the first is shown."""
    title: str
    tooltip: str
    scope: tuple[str, ...] = _MAIN
    target: Target = ""
    ask: bool = False
    """Names its target and what it costs, and defaults to No."""
    mutates: bool = False
    """Refused in a read-only console."""
    footer: int = 0
    """Its rank in the footer, 1 first; 0: not there."""
    command: str = ""
    """The same on the command line; empty for what only a screen needs."""


ACTIONS: tuple[Action, ...] = (
    # What acts on the cluster
    Action(
        name="restart",
        keys="r",
        title="restart",
        tooltip="Drain and restart the chosen process",
        scope=_PROCESS,
        target="process",
        ask=True,
        mutates=True,
        footer=1,
        command="eccon restart NAME",
    ),
    Action(
        name="add",
        keys="a",
        title="add",
        tooltip="Add an encoder on the next free device and port",
        scope=("overview",),
        ask=True,
        mutates=True,
        footer=2,
        command="eccon add",
    ),
    Action(
        name="prompt",
        keys="p",
        title="prompt",
        tooltip="Send a test prompt with images",
        mutates=True,
        footer=3,
        command="eccon send",
    ),
    Action(
        name="stop",
        keys="s",
        title="stop",
        tooltip="Drain and stop the chosen process",
        scope=_PROCESS,
        target="process",
        ask=True,
        mutates=True,
        command="eccon stop NAME",
    ),
    Action(
        name="start",
        keys="S",
        title="start",
        tooltip="Start the chosen process, also after it failed",
        scope=_PROCESS,
        target="process",
        mutates=True,
        command="eccon start NAME",
    ),
    Action(
        name="kill",
        keys="K",
        title="kill",
        tooltip="Stop the chosen process at once, without draining",
        scope=_PROCESS,
        target="process",
        ask=True,
        mutates=True,
        command="eccon stop --force NAME",
    ),
    Action(
        name="remove",
        keys="x",
        title="remove",
        tooltip="Drain, stop and forget the chosen encoder",
        scope=("overview", "detail"),
        target="encoder",
        ask=True,
        mutates=True,
        command="eccon remove NAME",
    ),
    Action(
        name="drain",
        keys="d",
        title="drain",
        tooltip="Give the chosen encoder no more items; it goes on running",
        scope=("overview", "detail"),
        target="encoder",
        ask=True,
        mutates=True,
        command="eccon drain NAME",
    ),
    Action(
        name="resume",
        keys="u",
        title="resume",
        tooltip="Give the chosen encoder items again",
        scope=("overview", "detail"),
        target="encoder",
        mutates=True,
        command="eccon resume NAME",
    ),
    Action(
        name="up",
        keys="U",
        title="cluster up",
        tooltip="Start everything that is not up",
        scope=("overview",),
        mutates=True,
        command="eccon up",
    ),
    Action(
        name="down",
        keys="D",
        title="cluster down",
        tooltip="Drain the proxy, then stop all servers",
        scope=("overview",),
        ask=True,
        mutates=True,
        command="eccon down",
    ),
    Action(
        name="roll",
        keys="R",
        title="rolling restart",
        tooltip="Restart all encoders, one after the other, each when the one before is ready",
        scope=("overview",),
        ask=True,
        mutates=True,
        command="eccon restart --rolling",
    ),
    Action(
        name="restart_pd",
        keys="P",
        title="restart PD",
        tooltip="Restart the PD, whatever is chosen",
        scope=("overview", "detail"),
        ask=True,
        mutates=True,
        command="eccon restart pd",
    ),
    Action(
        name="scale",
        keys="N",
        title="scale",
        tooltip="Add or remove encoders until there are so many",
        scope=("overview",),
        ask=True,
        mutates=True,
        command="eccon scale COUNT",
    ),
    Action(
        name="doctor",
        keys="f8",
        title="doctor",
        tooltip="Run every check of the installation and the cluster, and show what it found",
        scope=("overview",),
        command="eccon doctor",
    ),
    Action(
        name="diagnostics",
        keys="f9",
        title="diagnostics bundle",
        tooltip="Write states, configuration, last logs and traces into one file, secrets masked",
        scope=("overview",),
        command="eccon diagnostics FILE",
    ),
    Action(
        name="reload",
        keys="f5",
        title="reload configuration",
        tooltip="Read eccon.toml again",
        scope=("overview",),
        ask=True,
        mutates=True,
        command="eccon reload",
    ),
    # Where to look
    Action(
        name="open",
        keys="enter",
        title="details",
        tooltip="Open the chosen line: a process, or a request's waterfall",
        scope=("overview", "traces", "events"),
        footer=0,
    ),
    Action(
        name="traces",
        keys="t",
        title="traces",
        tooltip="All requests, with a filter",
        scope=("overview", "detail", "logs", "events", "charts"),
        footer=4,
        command="eccon traces",
    ),
    Action(
        name="logs",
        keys="l",
        title="logs",
        tooltip="The log of the chosen process, or the lines of a request",
        scope=("overview", "detail", "traces", "trace", "events"),
        footer=5,
        command="eccon logs NAME -f",
    ),
    Action(
        name="events",
        keys="e",
        title="events",
        tooltip="Alarms and the cluster's history",
        scope=("overview", "detail", "logs", "traces"),
        footer=9,
        command="eccon status",
    ),
    Action(
        name="filter",
        keys="slash",
        title="filter",
        tooltip="Show only lines with these words; >1.5 means slower than 1.5 s",
        scope=("overview", "traces", "events"),
        footer=6,
    ),
    Action(
        name="charts",
        keys="c",
        title="charts",
        tooltip="All charts: requests, first byte, transfer, fan-out, queue, tokens",
        scope=("overview", "detail", "traces", "events"),
        footer=8,
    ),
    Action(
        name="window",
        keys="w",
        title="window",
        tooltip="How much time the charts span: 1, 5 or 30 minutes",
        scope=("overview", "detail", "charts"),
        footer=12,
    ),
    Action(
        name="acknowledge",
        keys="A",
        title="acknowledge",
        tooltip="Quiet the alarms that are shown; they stay in the list of events",
        scope=("overview", "events"),
    ),
    Action(
        name="attend",
        keys="exclamation_mark",
        title="attend",
        tooltip="Choose the process that the alarm is about; again: that of the next alarm",
        scope=("overview",),
    ),
    Action(name="back", keys="escape", title="back", tooltip="Back to the screen before", footer=8),
    # Requests
    Action(
        name="pause",
        keys="space",
        title="pause",
        tooltip="Hold the list or the log still; what comes meanwhile is kept",
        scope=("traces", "logs", "events"),
        footer=2,
    ),
    Action(
        name="copy",
        keys="y",
        title="copy",
        tooltip="Copy: a request as curl, a log's lines, a process's command; also written to a file",
        scope=("trace", "traces", "logs", "detail"),
        footer=3,
    ),
    Action(
        name="export",
        keys="E",
        title="export JSON",
        tooltip="Write the request's trace as JSON into the present directory",
        scope=("trace", "traces"),
        target="trace",
        footer=4,
        command="eccon traces --json",
    ),
    Action(
        name="chrome",
        keys="C",
        title="export Chrome trace",
        tooltip="Write the request's trace for chrome://tracing or Perfetto",
        scope=("trace", "traces"),
        target="trace",
    ),
    # Logs
    Action(
        name="search",
        keys="slash",
        title="search",
        tooltip="Search the log; /…/ searches a regular expression",
        scope=("logs",),
        footer=1,
    ),
    Action(
        name="next", keys="n", title="next", tooltip="The next line that matches", scope=("logs",), footer=4
    ),
    Action(
        name="previous", keys="N", title="previous", tooltip="The line before that matches", scope=("logs",)
    ),
    Action(
        name="wrap", keys="w", title="wrap", tooltip="Fold long lines, or cut them", scope=("logs",), footer=6
    ),
    Action(
        name="times",
        keys="z",
        title="times",
        tooltip="Put each line's time before it, in one form for all logs",
        scope=("logs",),
    ),
    Action(
        name="merged",
        keys="m",
        title="all logs",
        tooltip="The logs of all processes, merged by time",
        scope=("logs",),
        footer=5,
    ),
    Action(
        name="only",
        keys="ampersand",
        title="only",
        tooltip="Only lines with a text, out of the whole log with its rotated files, of any size",
        scope=("logs",),
        command="eccon logs NAME -g TEXT",
    ),
    Action(
        name="level",
        keys="v",
        title="level",
        tooltip="Only lines of at least this level: all, info, warning, error",
        scope=("logs",),
        footer=7,
    ),
    Action(
        name="older",
        keys="o",
        title="older",
        tooltip="Fetch more of the log's past",
        scope=("logs",),
    ),
    Action(
        name="forward",
        keys="right_square_bracket",
        title="next process",
        tooltip="The same screen for the next process",
        scope=("logs", "detail"),
        footer=9,
    ),
    Action(
        name="backward",
        keys="left_square_bracket",
        title="process before",
        tooltip="The same screen for the process before",
        scope=("logs", "detail"),
    ),
    # Everywhere
    Action(
        name="help", keys="question_mark,f1", title="help", tooltip="The keys of the screen at hand", footer=3
    ),
    Action(
        name="palette", keys="ctrl+p,colon", title="command", tooltip="Find an action by its name", footer=10
    ),
    Action(
        name="jump",
        keys="J",
        title="jump",
        tooltip="Paint a letter on each pane; press it to go there",
        scope=("overview",),
    ),
    Action(
        name="faster",
        keys="plus",
        title="faster",
        tooltip="Twice as fast, in a recording",
    ),
    Action(name="slower", keys="minus", title="slower", tooltip="Half as fast, in a recording"),
    Action(
        name="hold", keys="full_stop", title="hold", tooltip="Stop the clock of a recording, or let it run"
    ),
    Action(name="theme", keys="T", title="theme", tooltip="Choose the colours, with a live preview"),
    Action(
        name="mouse",
        keys="M",
        title="mouse",
        tooltip="Give the mouse back to the terminal for its own selection, and take it again",
    ),
    Action(
        name="bell", keys="B", title="bell", tooltip="Ring the terminal's bell on a new alarm, or be quiet"
    ),
    Action(
        name="notify",
        keys="O",
        title="desktop notification",
        tooltip="Tell a new alarm to the desktop through the terminal (OSC 9, or 777), or not",
    ),
    Action(name="redraw", keys="ctrl+l", title="redraw", tooltip="Send the whole screen again"),
    Action(
        name="quit",
        keys="q",
        title="leave",
        tooltip="Leave the console; asks whether servers stop",
        footer=11,
    ),
)

_LABELS = {
    "slash": "/",
    "plus": "+",
    "minus": "-",
    "full_stop": ".",
    "exclamation_mark": "!",
    "ampersand": "&",
    "question_mark": "?",
    "colon": ":",
    "escape": "esc",
    "space": "space",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "ctrl+p": "^p",
    "ctrl+l": "^l",
    "enter": "enter",
}


def by_name(name: str) -> Action:
    """The action of that name. Raises KeyError."""
    for action in ACTIONS:
        if action.name == name:
            return action
    raise KeyError(name)


def in_scope(scope: str) -> list[Action]:
    """The actions of a screen, in the table's order."""
    return [a for a in ACTIONS if scope in a.scope]


def key_label(action: Action, keymap: Mapping[str, str]) -> str:
    """How the action's first key is shown, the user's keymap regarded."""
    key = keymap.get(action.name, action.keys).split(",")[0].strip()
    return _LABELS.get(key, key.replace("ctrl+", "^"))


def footer(scope: str) -> Iterable[Action]:
    """The actions that a screen's footer names, most important first."""
    named = (a for a in in_scope(scope) if a.footer and not (a.name == "back" and scope == "overview"))
    return sorted(named, key=lambda a: a.footer)

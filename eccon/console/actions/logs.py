"""What a log can do."""

from eccon.console.actions.action import Action

__all__ = ["LOGS"]

LOGS: tuple[Action, ...] = (
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
)

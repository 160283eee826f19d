"""What every screen has: help, the terminal, a recording's clock, leaving."""

from eccon.console.actions.action import Action

__all__ = ["EVERYWHERE"]

EVERYWHERE: tuple[Action, ...] = (
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

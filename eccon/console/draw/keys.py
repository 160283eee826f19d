"""The footer: as many keys as fit."""

from collections.abc import Iterable, Mapping

from eccon.console import actions
from eccon.console.draw.text import Line, fit_line, line_width

__all__ = ["keys_line"]


def keys_line(shown: Iterable[actions.Action], keymap: Mapping[str, str], width: int) -> Line:
    """As many keys as fit, most important first; leaving is always at the right."""
    quit_action = actions.by_name("quit")
    tail: Line = [(actions.key_label(quit_action, keymap), "key"), (" leave ", "hint")]
    line: Line = [(" ", "text")]
    for action in shown:
        if action.name == "quit":
            continue
        part: Line = [(actions.key_label(action, keymap), "key"), (f" {action.title}  ", "hint")]
        if line_width(line) + line_width(part) + line_width(tail) > width:
            continue
        line += part
    room = width - line_width(line) - line_width(tail)
    return fit_line([*line, (" " * max(room, 0), "text"), *tail], width)

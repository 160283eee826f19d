"""The footer: as many keys as fit."""

from collections.abc import Iterable, Mapping

from eccon.console import actions
from eccon.console.draw.text import Line, fit_line, line_width

__all__ = ["key_at", "keys_line"]


def keys_line(shown: Iterable[actions.Action], keymap: Mapping[str, str], width: int) -> Line:
    """As many keys as fit, most important first; leaving is always at the right."""
    return fit_line([part for _, parts in _laid(shown, keymap, width) for part in parts], width)


def key_at(shown: Iterable[actions.Action], keymap: Mapping[str, str], width: int, x: int) -> str:
    """The name of the action whose key or title is at cell `x` of that line; empty between them."""
    end = 0
    for name, parts in _laid(shown, keymap, width):
        begin, end = end, end + line_width(parts)
        if begin <= x < end - len(parts[-1][0]) + len(parts[-1][0].rstrip()):
            return name
    return ""


def _laid(shown: Iterable[actions.Action], keymap: Mapping[str, str], width: int) -> list[tuple[str, Line]]:
    """The line in pieces: of an action with its name, of room with none."""
    quit_action = actions.by_name("quit")
    tail: Line = [(actions.key_label(quit_action, keymap), "key"), (" leave ", "hint")]
    out: list[tuple[str, Line]] = [("", [(" ", "text")])]
    room = width - 1 - line_width(tail)
    for action in shown:
        part: Line = [(actions.key_label(action, keymap), "key"), (f" {action.title}  ", "hint")]
        if action.name != "quit" and line_width(part) <= room:
            out.append((action.name, part))
            room -= line_width(part)
    return [*out, ("", [(" " * max(room, 0), "text")]), ("quit", tail)]

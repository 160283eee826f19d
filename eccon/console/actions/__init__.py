"""The one table of what a user can do: keys, footer, palette, help and documentation are made from it.

A handler is a method `act_NAME` of the screen, or of the app.
"""

from collections.abc import Iterable, Mapping

from eccon.console.actions.action import SCOPES, Action
from eccon.console.actions.cluster import CLUSTER
from eccon.console.actions.everywhere import EVERYWHERE
from eccon.console.actions.logs import LOGS
from eccon.console.actions.looking import LOOKING

__all__ = ["ACTIONS", "SCOPES", "Action", "by_name", "footer", "in_scope", "key_label"]

ACTIONS = (*CLUSTER, *LOOKING, *LOGS, *EVERYWHERE)

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

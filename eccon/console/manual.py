"""The list of keys as a document, made from the table of actions.

`python -m eccon.console.manual > docs/keys.md` writes it.
"""

from eccon.console.actions import SCOPES, Action, in_scope, key_label

__all__ = ["markdown"]

TITLES = {
    "overview": "Overview",
    "charts": "Charts",
    "detail": "One process",
    "traces": "Requests",
    "trace": "One request",
    "logs": "Logs",
    "events": "Alarms and events",
}
HEAD = """\
# Keys of the console

Made from the console's table of actions. A key is changed in `~/.config/eccon/console.toml` by the name of
its action:

```toml
[keys]
restart = "f2"
```

Arrows, `j` `k`, page up and down, `g` and `G` move; `tab` goes to the next pane. `^` stands for control.
Actions marked ? name their target and what they cost before anything is done, and default to No; those
marked ! are refused in a console that is read-only.
"""


def _keys(action: Action) -> str:
    alone = [key_label(action, {action.name: key}) for key in action.keys.split(",")]
    return " ".join(f"`{key}`" for key in alone)


def markdown() -> str:
    """The document: a table a screen; what holds on every screen once."""
    everywhere = [a for a in in_scope(SCOPES[0]) if set(a.scope) == set(SCOPES)]
    parts = [HEAD]
    for title, actions in (
        ("Everywhere", everywhere),
        *((TITLES[scope], [a for a in in_scope(scope) if a not in everywhere]) for scope in SCOPES),
    ):
        parts.append(
            f"\n## {title}\n\n| key | action | name | what it does | command |\n|---|---|---|---|---|\n"
        )
        for a in actions:
            marks = (" ?" if a.ask else "") + (" !" if a.mutates else "")
            command = f"`{a.command}`" if a.command else ""
            parts.append(f"| {_keys(a)} | {a.title}{marks} | `{a.name}` | {a.tooltip} | {command} |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")

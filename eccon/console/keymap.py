"""The user's own keys and settings, from `console.toml` in the configuration directory."""

import sys
from collections import defaultdict
from pathlib import Path
from typing import Literal

import msgspec

from eccon.console.actions import ACTIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Settings", "clashes", "load"]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user may set for all consoles."""

    theme: str | None = None
    bell: bool = False
    notify: Literal["off", "osc9", "osc777"] = "off"
    """Desktop notification of a new alarm: OSC 9 (iTerm2, kitty, WezTerm, Ghostty), OSC 777 (foot, urxvt)."""
    mouse: bool = True
    images: Literal["auto", "kitty", "sixel", "iterm", "blocks", "off"] = "auto"
    """How previews of images are drawn; auto: by the best protocol that the terminal says it has."""
    keys: dict[str, str] = {}
    """Action → key or keys, in Textual's names: `restart = "f2"`."""


def load(path: Path) -> tuple[Settings, list[str]]:
    """The settings in `path`, and what is wrong there; what is wrong is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Settings(), []
    except (OSError, ValueError) as e:
        return Settings(), [f"{path}: {e}"]
    try:
        settings = msgspec.convert(tomllib.loads(text), Settings)
    except (ValueError, msgspec.ValidationError) as e:
        return Settings(), [f"{path}: {e}"]
    names = {a.name for a in ACTIONS}
    wrong = [f"{path}: keys.{name}: there is no such action" for name in settings.keys if name not in names]
    keys = {name: key for name, key in settings.keys.items() if name in names}
    found = clashes(keys)
    return msgspec.structs.replace(settings, keys=keys), wrong + [f"{path}: {c}" for c in found]


def clashes(keys: dict[str, str]) -> list[str]:
    """Pairs of actions that one key would stand for on the same screen."""
    taken: dict[tuple[str, str], list[str]] = defaultdict(list)
    for action in ACTIONS:
        for key in keys.get(action.name, action.keys).split(","):
            for scope in action.scope:
                taken[scope, key.strip()].append(action.name)
    seen: dict[tuple[str, tuple[str, ...]], str] = {}
    for (scope, key), names in taken.items():
        if len(names) > 1:
            seen.setdefault((key, tuple(names)), scope)
    return [f"key {key} stands for {' and '.join(names)} ({scope})" for (key, names), scope in seen.items()]

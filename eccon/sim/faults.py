"""Faults on demand: `ECCON_SIM_FAULT=name[:N][,name...]`, each for the first N times (without N: always).

`ECCON_SIM_FAULT=@FILE` takes them from a file, read anew at every turn, so that a fault can come and go while
a process runs. Names:

- `start-fail`: the engine raises while it loads; the process exits 1.
- `start-hang`: never gets ready.
- `ignore-term`: API server and engine go on after SIGTERM.
- `encode-hang`: an item is never finished; `/health` stays 200.
- `encode-error`: an item is answered with 500; the engine lives.
- `encode-crash`: the engine raises on an item.
- `push-drop`: an item is encoded and held, answered with 200, and never announced.
- `die-after-push`: after an item was announced the whole process tree kills itself.
- `health-hang`: `/health` is accepted and never answered.
"""

import os
from pathlib import Path

__all__ = ["Faults"]


class Faults:
    """What goes wrong in this process, and how often still."""

    def __init__(self, setting: str | None = None) -> None:
        self._setting = os.environ.get("ECCON_SIM_FAULT", "") if setting is None else setting
        self._taken: dict[str, int] = {}

    def take(self, name: str) -> bool:
        """Whether `name` is to happen now; counts as one time."""
        for entry in self._text().replace(",", " ").split():
            wanted, _, count = entry.partition(":")
            if wanted == name:
                taken = self._taken.get(name, 0)
                if count.isdigit() and taken >= int(count):
                    return False
                self._taken[name] = taken + 1
                return True
        return False

    def named(self, name: str) -> bool:
        """Whether `name` is asked for at all; does not count."""
        return any(e.partition(":")[0] == name for e in self._text().replace(",", " ").split())

    def _text(self) -> str:
        if not self._setting.startswith("@"):
            return self._setting
        try:
            return Path(self._setting[1:]).read_text(encoding="utf-8")
        except OSError:
            return ""

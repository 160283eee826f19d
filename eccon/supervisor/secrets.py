"""What of a command line may be seen."""

import re
from collections.abc import Iterable

__all__ = ["shown"]

SECRET = re.compile(r"(?i)^(--?[\w-]*(?:api-key|token(?!s)|password|secret)[\w-]*)(=.*)?$")
MASK = "***"


def shown(argv: Iterable[str]) -> tuple[str, ...]:
    """`argv` with the values of secret flags masked."""
    safe: list[str] = []
    hide = False
    for word in argv:
        found = SECRET.match(word)
        if hide and not word.startswith("-"):
            safe.append(MASK)
        elif found and found[2]:
            safe.append(f"{found[1]}={MASK}")
        else:
            safe.append(word)
        hide = bool(found and not found[2])
    return tuple(safe)

"""What of a command line and of an environment may be seen."""

import re
from collections.abc import Iterable, Mapping

from eccon.launch import ProcessSpec

__all__ = ["MASK", "secret_values", "shown", "shown_env"]

SECRET = re.compile(r"(?i)^(--?[\w-]*(?:api-key|token(?!s)|password|secret)[\w-]*)(=.*)?$")
SECRET_NAME = re.compile(r"(?i)secret|passw|credential|api_?key|(?:^|_)(?:key|token)s?$")
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


def shown_env(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """`env` by name, with the values of secret variables masked."""
    return tuple((k, MASK if v and SECRET_NAME.search(k) else v) for k, v in sorted(env.items()))


def secret_values(specs: Iterable[ProcessSpec], env: Mapping[str, str]) -> set[str]:
    """Every secret that `env`, or a process's environment or command line, holds."""
    specs = list(specs)
    found = {v for e in (env, *(s.env for s in specs)) for k, v in e.items() if v and SECRET_NAME.search(k)}
    for spec in specs:
        for word, safe in zip(spec.argv, shown(spec.argv), strict=True):
            if word != safe:
                found.add(word.partition("=")[2] if safe.endswith(f"={MASK}") else word)
    return found

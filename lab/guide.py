"""The guide's proxy, cut out of a copy of the guide that the reader has; its text is not ours to ship."""

import re
from pathlib import Path

__all__ = ["extract"]


def extract(guide: Path, to: Path) -> Path:
    """Writes the script that takes `--decode-servers-urls`: from its shebang to the next heading.

    Raises:
        ValueError: there is no such script in it, or what was found is not Python.
    """
    text = guide.read_text(encoding="utf-8")
    for start in re.finditer(r"^#!.*python.*$", text, re.MULTILINE):
        rest = text[start.start() :]
        heading = re.search(r"^(?:```|\d+\.\d+ )", rest[1:], re.MULTILINE)
        script = rest[: heading.start() + 1] if heading else rest
        if "--decode-servers-urls" in script:
            compile(script, str(guide), "exec")
            to.write_text(script, encoding="utf-8")
            return to
    msg = f"{guide} holds no proxy script"
    raise ValueError(msg)

"""What a check says: how bad it is, what it saw, and what to do about it."""

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

__all__ = ["Finding", "Severity", "bad", "exit_code", "good", "note", "warn"]

Severity: TypeAlias = Literal["ok", "info", "warning", "error"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a check. `check` names it for programs and never changes."""

    check: str
    severity: Severity
    text: str
    evidence: str = ""
    advice: str = ""


def good(check: str, text: str, evidence: str = "") -> Finding:
    """Looked at, and as it should be."""
    return Finding(check=check, severity="ok", text=text, evidence=evidence)


def note(check: str, text: str, evidence: str = "", advice: str = "") -> Finding:
    """Worth knowing; nothing is wrong, or it could not be told."""
    return Finding(check=check, severity="info", text=text, evidence=evidence, advice=advice)


def warn(check: str, text: str, evidence: str = "", *, advice: str) -> Finding:
    """It works, and may fail or be slow."""
    return Finding(check=check, severity="warning", text=text, evidence=evidence, advice=advice)


def bad(check: str, text: str, evidence: str = "", *, advice: str) -> Finding:
    """It will not work, or will break under load."""
    return Finding(check=check, severity="error", text=text, evidence=evidence, advice=advice)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 with an error among them, else 0."""
    return int(any(f.severity == "error" for f in findings))

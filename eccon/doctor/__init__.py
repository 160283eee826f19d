"""Looks for what will go wrong before it does: evidence is gathered once, then judged by pure functions."""

from eccon.doctor.checks import examine
from eccon.doctor.evidence import Evidence
from eccon.doctor.finding import Finding, Severity, exit_code

__all__ = ["Evidence", "Finding", "Severity", "examine", "exit_code"]

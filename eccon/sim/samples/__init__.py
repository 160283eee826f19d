"""Eight small images of different formats, sizes and colours, for test prompts."""

from pathlib import Path

__all__ = ["SAMPLES"]

SAMPLES = tuple(sorted(p for p in Path(__file__).parent.iterdir() if p.stem[:1].isdigit()))
"""In order: 1-circle to 8-rings."""

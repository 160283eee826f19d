"""What the accelerator devices of this host do, as their vendors' tools tell."""

from eccon.signals.devices.reading import Context, Reading, ToolError, numbers, reader

__all__ = ["Context", "Reading", "ToolError", "numbers", "reader"]

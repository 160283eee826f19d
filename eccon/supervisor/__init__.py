"""The daemon: starts, watches, stops and finds again the processes of one cluster."""

from eccon.supervisor.start import DaemonError, start_daemon

__all__ = ["DaemonError", "start_daemon"]

"""A topology as files that start it without eccon's daemon: the guide's launchers, or systemd units."""

from eccon.export.files import ExportError, File, write
from eccon.export.shell import scripts
from eccon.export.systemd import units

__all__ = ["ExportError", "File", "scripts", "units", "write"]

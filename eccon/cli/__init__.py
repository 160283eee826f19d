"""The `eccon` command."""

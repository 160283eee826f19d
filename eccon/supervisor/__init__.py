"""The daemon: starts, watches and stops the cluster's processes."""

"""Topology to argv and environment of each process."""

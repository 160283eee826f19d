"""Measurements on the lab (`eccon lab setup`): run from a clone, not part of the package."""

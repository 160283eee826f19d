"""For all tests: hypothesis neither times its examples (machines are shared) nor draws new ones each run."""

from hypothesis import settings

settings.register_profile("eccon", deadline=None, derandomize=True)
settings.load_profile("eccon")

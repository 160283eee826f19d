"""For all tests: hypothesis neither times its examples (machines are shared) nor draws new ones each run.

What tests start may be interrupted, also when the tests themselves were started in the background, where a
shell has SIGINT ignored and children inherit that.
"""

import signal

from hypothesis import settings

settings.register_profile("eccon", deadline=None, derandomize=True)
settings.load_profile("eccon")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

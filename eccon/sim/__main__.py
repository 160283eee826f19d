"""`python -m eccon.sim`."""

import sys

from eccon.sim.cli import main

sys.exit(main())

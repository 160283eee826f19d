"""Which release of vLLM the stand-in is: 0.30.0, or what `ECCON_SIM_VLLM` names, and what it does then.

The differences are those that the contract tests show between real ones on CPU.
"""

import os
from functools import cache

import msgspec

from eccon.sim.tunables import TunableError

__all__ = ["Release", "release"]


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """One release."""

    version: str
    marks_streams: bool
    """Every line of a subprocess begins with its name. Else log records know the name, and only vLLM's own
    format shows it."""
    banner: bool
    """The version is told by a drawing, else by a line."""
    trusts_requests: bool
    """Requests may bring media options of their own. Else only with `--trust-request-mm-kwargs`."""


RELEASES = (
    Release(version="0.30.0", marks_streams=True, banner=True, trusts_requests=True),
    Release(version="0.32.0", marks_streams=False, banner=False, trusts_requests=False),
)


@cache
def release() -> Release:
    """The one that this process is.

    Raises:
        TunableError: ECCON_SIM_VLLM names one that is not known.
    """
    wanted = os.environ.get("ECCON_SIM_VLLM") or RELEASES[0].version
    for known in RELEASES:
        if known.version == wanted:
            return known
    msg = f"ECCON_SIM_VLLM={wanted!r}: must be {' or '.join(r.version for r in RELEASES)}"
    raise TunableError(msg)

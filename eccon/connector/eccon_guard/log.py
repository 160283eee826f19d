"""The guard's logger: below the vendor connector's, so that what configures the one configures the other."""

import logging

__all__ = ["logger"]

logger = logging.getLogger("vllm_rbln.distributed.ec_transfer.guard")

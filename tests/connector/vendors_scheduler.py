"""Runs in vLLM's environment: vllm-rbln's scheduler over vLLM's own CPU runner, for the levels below `gate`.

Of the vendor's platform only what the scheduler reads of its configuration is stood in. It leaves encoder
inputs to the vendor's runner, so on this one it can schedule a PD, and no encoder.
"""

from types import SimpleNamespace
from typing import Any

from vllm_rbln.v1.core.optimum_scheduler import RBLNOptimumScheduler

__all__ = ["Unwrappable", "VendorsScheduler"]


class VendorsScheduler(RBLNOptimumScheduler):  # type: ignore[misc]  # vLLM is not where types are checked
    """As it is."""

    def __init__(self, vllm_config: Any, *args: Any, block_size: int, **kwargs: Any) -> None:
        vllm_config.additional_config = SimpleNamespace(
            attn_block_size=block_size, image_prefill_chunk_size=None
        )
        super().__init__(vllm_config, *args, block_size=block_size, **kwargs)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """vLLM's runner wants no items where the vendor's wants None."""
        scheduler_output.scheduled_encoder_inputs = {}
        super()._update_after_schedule(scheduler_output)


class Unwrappable(VendorsScheduler):
    """One whose `schedule` shows no queue that the guard knows."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As it is."""
        return super().schedule(*args, **kwargs)

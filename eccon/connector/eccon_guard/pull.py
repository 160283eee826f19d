"""One NIXL read: its buffer, its registration, its handle. Used by the puller's thread alone."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from .log import logger
from .wire import SIZES, Message

__all__ = ["Pull", "PullError"]

MEMORY = "DRAM"
OURSELVES = "NIXL_INIT_AGENT"


class PullError(Exception):
    """It cannot be begun, or has failed."""


class Pull:
    """A read under way. What was registered is kept until NIXL no longer writes into it.

    Raises:
        PullError: it could not be begun; nothing is left registered.
    """

    def __init__(
        self,
        agent: Any,
        backends: Sequence[str],
        allocate: Callable[[int], Any],
        remote: Any,
        message: Message,
    ) -> None:
        self._agent = agent
        self._handle: Any = None
        self._registered: Any = None
        info = message.tensor
        try:
            self.tensor = allocate(info.nbytes // SIZES[info.dtype_str]).reshape(info.shape)
            if self.tensor.numel() * self.tensor.element_size() != info.nbytes:
                raise PullError(f"a buffer for {info.dtype_str} has another size than {info.nbytes} bytes")
            self.address: int = self.tensor.data_ptr()
            here = [(self.address, info.nbytes, 0)]
            described = agent.get_reg_descs([(*here[0], "")], MEMORY)
            agent.register_memory(described, backends=list(backends))
            self._registered = described
            local = agent.prep_xfer_dlist(OURSELVES, here, MEMORY)
            there = agent.prep_xfer_dlist(remote, [(info.base_addr, info.nbytes, info.device_id)], MEMORY)
            self._handle = agent.make_prepped_xfer("READ", local, [0], there, [0], notif_msg=b"")
            if agent.transfer(self._handle) not in {"DONE", "PROC"}:
                raise PullError("the read was not begun")
        except PullError:
            self.release()
            raise
        except Exception as e:
            self.release()
            raise PullError(f"{type(e).__name__}: {e}") from e

    def state(self) -> Literal["DONE", "PROC"]:
        """How far it is. Raises PullError when it has failed."""
        try:
            state = self._agent.check_xfer_state(self._handle)
        except Exception as e:
            raise PullError(f"{type(e).__name__}: {e}") from e
        if state == "DONE":
            return "DONE"
        if state == "PROC":
            return "PROC"
        raise PullError(f"the read failed ({state})")

    def release(self) -> None:
        """Let go of handle and registration; the tensor stays. Not while it is PROC."""
        handle, self._handle = self._handle, None
        registered, self._registered = self._registered, None
        for thing, free in ((handle, "release_xfer_handle"), (registered, "deregister_memory")):
            if thing is None:
                continue
            try:
                getattr(self._agent, free)(thing)
            except Exception as e:  # noqa: BLE001  the peer may be dead, and the rest must be let go too
                logger.warning("EC guard: %s failed: %s", free, e)

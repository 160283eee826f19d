"""The engine's cache of encoder outputs: in use by running requests, or kept as long as there is room."""

from collections import OrderedDict
from collections.abc import Iterable

from eccon.sim.vision import Tensor

__all__ = ["EncoderCache"]


class EncoderCache:
    """As vLLM's encoder cache manager: an item no request uses stays until its room is needed, oldest first.

    Room is counted in visual tokens. With no room at all an item goes when its last request ends, which is
    what vllm-rbln's scheduler does with every item.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self.tensors: dict[str, Tensor] = {}
        self._users: dict[str, set[str]] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()

    def use(self, request: str, mm_hash: str) -> None:
        """`request` needs that item, which is there or will be."""
        self._users.setdefault(mm_hash, set()).add(request)
        self._idle.pop(mm_hash, None)

    def trim(self) -> None:
        """Let idle items go until the rest fits."""
        while self._idle and sum(t.shape[0] for t in self.tensors.values()) > self._room:
            mm_hash, _ = self._idle.popitem(last=False)
            self.tensors.pop(mm_hash, None)

    def release(self, request: str, hashes: Iterable[str]) -> None:
        """`request` has ended."""
        for mm_hash in hashes:
            users = self._users.get(mm_hash, set())
            users.discard(request)
            if not users and mm_hash in self._users:
                del self._users[mm_hash]
                if mm_hash in self.tensors:
                    self._idle[mm_hash] = None
        if self._room == 0:
            self.trim()

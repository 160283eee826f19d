"""The `uuid` that an item gets on the encoder's and on the PD's copy of a request.

vLLM takes it for the item's hash: the EC connector's key. A new one for every attempt means that no
encoder believes to have pushed it before and no PD holds another image under it.
"""

import itertools
import os
import re
from collections import OrderedDict

from eccon_proxy.plan import Item, Plan, content_uuid
from eccon_proxy.settings import Settings

__all__ = ["Identity"]

SEEN_SIZE = 8192
ADDRESS_MAX = 16 * 1024
"""No address is longer: such a part has its bytes in it."""
INLINE = re.compile(rb'"data:[^"]', re.IGNORECASE)


class Identity:
    """Makes identities according to `--identity`."""

    def __init__(self, settings: Settings) -> None:
        self.mode = settings.identity
        # Unique over restarts of the proxy, since encoders outlive it; of one length, so that none is the
        # beginning of another in a log.
        self._prefix = b"ec-" + os.urandom(9).hex().encode()
        self._serial = itertools.count(1)
        self._seen: OrderedDict[str, str] = OrderedDict()

    @property
    def keeps(self) -> bool:
        """Whether the client's body stays as it is."""
        return self.mode == "off"

    def make(self, plan: Plan, item: Item, *, renew: bool = False) -> bytes | None:
        """An identity for one attempt at an item; None leaves the part as the client sent it.

        With `renew` it is one that was never used, where identities are ours to give. So it is for what only
        an address tells of: other bytes may be there the next time.
        """
        if self.mode == "attempt" or (self.mode == "content" and (renew or not _is_inline(plan, item))):
            return b"%b-%010x" % (self._prefix, next(self._serial))
        return content_uuid(plan, item) if self.mode == "content" else None

    def label(self, item: Item) -> bytes:
        """A key for the books when the part keeps what the client sent."""
        return (item.client_uuid or "").encode("utf-8", "replace") + b"#%x" % next(self._serial)

    def saw(self, client_uuid: str, encoder: str) -> None:
        """An encoder has encoded an item under the client's own uuid."""
        self._seen[client_uuid] = encoder
        self._seen.move_to_end(client_uuid)
        if len(self._seen) > SEEN_SIZE:
            self._seen.popitem(last=False)

    def who_saw(self, client_uuid: str) -> str | None:
        """The encoder that has seen a uuid."""
        return self._seen.get(client_uuid)


def _is_inline(plan: Plan, item: Item) -> bool:
    """Whether the part has the item's bytes in it, written plainly; what is in doubt has not."""
    if not item.payload or item.kind == "input_audio":
        return True  # there is nothing to fetch
    start, end = item.place.start, item.place.end
    return end - start > ADDRESS_MAX or INLINE.search(plan.body, start, end) is not None

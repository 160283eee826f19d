"""The name of a media item (`mm_hash`): what encoder and PD must agree on without speaking to each other.

As in vLLM 0.30: from the literal model string, the item's bytes and the request's own `mm_processor_kwargs`
and `media_io_kwargs`. A `uuid` on the part stands in for the bytes, and without such kwargs it is the name
itself. The server's own `--mm-processor-kwargs` are not in it.
"""

import hashlib
import json
from typing import Any

__all__ = ["mm_hash"]


def mm_hash(
    model: str,
    modality: str,
    *,
    content: bytes | None,
    uuid: str | None,
    mm_processor_kwargs: dict[str, Any] | None,
    media_io_kwargs: dict[str, Any] | None,
) -> str:
    """64 hexadecimal digits, or the uuid verbatim. `content` may be None only where a uuid is given."""
    io = (media_io_kwargs or {}).get(modality) or {}
    factors = {"media_io_kwargs": io, "mm_processor_kwargs": mm_processor_kwargs or {}}
    factors = {name: value for name, value in factors.items() if value}
    if uuid is not None and not factors:
        return uuid
    digest = hashlib.sha256()
    for piece in (b"model_id", model.encode(errors="surrogatepass"), modality.encode()):
        digest.update(len(piece).to_bytes(8, "big") + piece)
    item = uuid.encode(errors="surrogatepass") if uuid is not None else content
    if item is None:
        msg = "an item without uuid and without content has no name"
        raise ValueError(msg)
    digest.update(len(item).to_bytes(8, "big"))
    digest.update(item)
    digest.update(json.dumps(factors, sort_keys=True).encode())
    return digest.hexdigest()

"""From media parts to items of the engine: identity, and on an encoder the decoded picture."""

import asyncio
import uuid
from collections import OrderedDict

from eccon.sim.chat import Chat
from eccon.sim.errors import bad_request
from eccon.sim.flags import Serve
from eccon.sim.identity import mm_hash
from eccon.sim.ipc import Item
from eccon.sim.media import decode, fetch
from eccon.sim.modeldir import Model
from eccon.sim.parts import Media
from eccon.sim.vision import Picture, TensorError, tokens

__all__ = ["Items"]

KEPT = 4096
"""Names that are remembered, instead of gigabytes of what they stand for."""


class Items:
    """Like vLLM's processor cache: a name means what came with it first, whatever comes with it later."""

    def __init__(self, serve: Serve, model: Model) -> None:
        self._serve = serve
        self._model = model
        self._seen: OrderedDict[str, Item] = OrderedDict()
        # An encoder has no prefix cache; without a processor cache either, vLLM hashes no content: an item
        # that has no uuid is named by its request, so that nobody ever asks for what is announced.
        self._hashing = not (serve.role == "producer" and serve.processor_cache_gb == 0)
        self._hits = 0
        self._queries = 0

    @property
    def lookups(self) -> tuple[int, int]:
        """Queries and hits, for the metrics."""
        return self._queries, self._hits

    async def of(self, chat: Chat) -> list[Item]:
        """The request's items, in order.

        Raises:
            ApiError: one cannot be fetched, decoded, or is not known by its uuid.
        """
        contents = await asyncio.gather(*(self._load(m) for m in chat.media))
        return [self._item(chat, i, m, *c) for i, (m, c) in enumerate(zip(chat.media, contents, strict=True))]

    async def _load(self, media: Media) -> tuple[bytes | None, Picture | None]:
        if media.url is None:
            return None, None
        data = await asyncio.to_thread(fetch, media.url, f"{media.modality}_url")
        if self._serve.role == "consumer":
            return data, None
        return data, await asyncio.to_thread(decode, data, media.modality)

    def _item(
        self, chat: Chat, index: int, media: Media, data: bytes | None, picture: Picture | None
    ) -> Item:
        given = media.uuid
        if given is None and not self._hashing:
            given = f"{uuid.uuid4().hex[:16]}-{media.modality}-{index}"
        name = mm_hash(
            self._serve.model,
            media.modality,
            content=data,
            uuid=given,
            mm_processor_kwargs=chat.mm_processor_kwargs,
            media_io_kwargs=chat.media_io_kwargs,
        )
        self._queries += 1
        known = self._seen.get(name)
        if known is not None:
            self._hits += 1
            self._seen.move_to_end(name)
            return known
        if data is None and not media.embeds:
            msg = f"Cache miss for {media.modality} at index {index} but data is not provided."
            raise bad_request(msg)
        item = Item(name, picture, self._tokens(chat, picture))
        self._seen[name] = item
        while len(self._seen) > KEPT:
            self._seen.popitem(last=False)
        return item

    def _tokens(self, chat: Chat, picture: Picture | None) -> int:
        if picture is None:
            return 0
        kwargs = chat.mm_processor_kwargs or {}
        try:
            return tokens(self._model.resized(kwargs), picture.width, picture.height)
        except (TensorError, TypeError, ValueError, ZeroDivisionError) as e:
            size = f"image mode=RGB size={picture.width}x{picture.height}"
            msg = (
                f"Failed to apply Qwen3VLProcessor on data={{'images': [<{size}>]}} with kwargs={kwargs}: {e}"
            )
            raise bad_request(msg) from e

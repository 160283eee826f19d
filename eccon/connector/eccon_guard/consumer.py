"""The PD's worker: its engine's thread only takes tensors that the puller has finished."""

import threading
import time
from collections import OrderedDict
from typing import Any

import torch
import zmq
from vllm_rbln.distributed.ec_transfer.ec_connector.rbln_ec_nixl_connector import (
    RblnECNixlConnectorWorker,
    aligned_tensor,
)

from .calm import calm
from .channel import Speaker
from .events import Events
from .log import logger
from .notes import Note
from .puller import Puller
from .settings import Settings
from .store import Store
from .wire import Message

__all__ = ["GuardConsumer"]

POLL_S = 0.005
LOST_MAX = 4096


class GuardConsumer(RblnECNixlConnectorWorker):  # type: ignore[misc]  # vLLM is not where types are checked
    """The vendor's worker with its receiver thread turned into a puller."""

    def __init__(
        self,
        vllm_config: Any,
        role: Any,
        settings: Settings,
        speaker: Speaker,
        events: Events,
    ) -> None:
        # Before the vendor's part, which starts the thread that uses all this.
        self._guard = settings
        self._speaker = speaker
        self._events = events
        self._store = Store(settings.staging_bytes, settings.staged_ttl_s, self._gone)
        self._lost: OrderedDict[str, str] = OrderedDict()
        self._width: int | None = None
        self._made = threading.Event()
        speaker.state = lambda: [Note("staged", h) for h in self._store.hashes()]
        super().__init__(vllm_config, role)
        self._puller = Puller(
            self._nixl_agent,
            self._backends,
            settings,
            self._store,
            aligned_tensor,
            self._acknowledge,
            self._say,
            events,
            self._tick,
            self._metadata_queue_max,
        )
        # Sockets to encoders that have gone stay, and would try again ten times a second for ever.
        self._zmq_ctx.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._made.set()

    # on the puller's thread

    def _receiver_loop(self) -> None:
        while not self._made.wait(0.2):
            if self._stop_event.is_set():
                return
        self._puller.run(self._pull_sock, self._stop_event)

    def _tick(self) -> None:
        self._speaker.tick()
        self._events.flush()

    def _say(self, note: Note) -> None:
        if note.kind == "bad":
            self._lost[note.mm_hash] = note.text
            if len(self._lost) > LOST_MAX:
                self._lost.popitem(last=False)
        elif note.kind in {"staged", "pending"}:
            self._lost.pop(note.mm_hash, None)
        self._speaker.say(note)

    def _gone(self, mm_hash: str, why: str) -> None:
        self._events.tell("evict", mm_hash, text=why)
        self._speaker.say(Note("gone", mm_hash))

    def _acknowledge(self, message: Message, status: str) -> None:
        """The vendor's acknowledgement, each time anew: it remembers hashes for ever, and sends one each."""
        mm_hash, engine_id = message.mm_hash, message.engine_id
        if not message.ack_host or not message.ack_port:
            return
        address = (message.ack_host, message.ack_port)
        with self._known_ack_addrs_lock:
            is_new = engine_id not in self._known_ack_addrs
            self._known_ack_addrs[engine_id] = address
        if is_new:
            logger.info("EC Nixl: discovered encoder engine=%s at %s:%d", engine_id, *address)
        self._tensor_registry[mm_hash] = (engine_id, message.tensor)
        self._mm_hash_ack_addr[mm_hash] = address
        self._ack_sent.discard(mm_hash)
        try:
            self._send_ack_if_unsent(mm_hash, status)
        except Exception as e:  # noqa: BLE001  an address that is none, from a message that is one
            logger.warning("EC guard: no acknowledgement to %s:%d: %s", *address, e)
        finally:
            self._tensor_registry.pop(mm_hash, None)
            self._mm_hash_ack_addr.pop(mm_hash, None)
            self._ack_sent.discard(mm_hash)
        self._events.tell("ack", mm_hash, peer=engine_id, text=status)

    # on the engine's thread

    @calm(lambda: None)
    def start_load_caches(self, encoder_cache: dict[str, Any], blocking: bool = True, **_: object) -> None:  # noqa: ARG002  the vendor's signature
        """Hand over finished tensors; what is missing all the same becomes zeros, and its request fails."""
        metadata = self._get_connector_metadata()
        self._store.want(getattr(metadata, "wanted", ()))
        deadline = time.monotonic() + (0.0 if getattr(metadata, "gated", False) else self._guard.wait_s)
        for item in metadata.mm_datas_to_load:
            mm_hash = item.mm_hash
            if mm_hash in encoder_cache:
                continue
            tensor = self._store.get(mm_hash)
            while tensor is None and time.monotonic() < deadline and mm_hash not in self._lost:
                time.sleep(POLL_S)
                tensor = self._store.get(mm_hash)
            if tensor is None:
                encoder_cache[mm_hash] = self._placeholder(mm_hash, item.num_token)
                continue
            self._width = tensor.shape[-1]
            encoder_cache[mm_hash] = tensor
            self._events.tell("load", mm_hash)

    def _placeholder(self, mm_hash: str, tokens: int) -> torch.Tensor:
        reason = self._lost.get(mm_hash, "it never came")
        logger.error(
            "EC guard: mm_hash=%s is missing in its step (%s): zeros take its place", mm_hash, reason
        )
        self._speaker.say(Note("placeholder", mm_hash, reason, time.time()))
        return torch.zeros((tokens, self._width or self._configured_width()), dtype=torch.float16)

    def _configured_width(self) -> int:
        """Hidden size times one for the item itself and each deepstack layer."""
        config = self._vllm_config.model_config.hf_config
        text = getattr(config, "text_config", config)
        layers = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
        return int(text.hidden_size) * (1 + len(layers))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:  # noqa: ARG002
        """Nothing is pending on this thread, ever."""
        return None, None

    @calm(lambda: None)
    def shutdown(self) -> None:
        """At the end."""
        self._stop_event.set()
        self._receiver_thread.join(timeout=5.0)
        super().shutdown()
        self._store.clear()
        self._speaker.close()
        self._events.close()

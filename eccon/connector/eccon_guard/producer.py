"""The encoder's worker: publishes items with a checksum, again whenever asked, and learns whether they came.

NIXL is called on the engine's thread alone; checksum and sending are the link's.
"""

import queue
import threading
import time
from contextlib import suppress
from typing import Any

from vllm_rbln.distributed.ec_transfer.ec_connector.rbln_ec_nixl_connector import (
    ECNixlAck,
    RblnECNixlConnectorWorker,
    aligned_tensor,
)

from .calm import calm
from .channel import Speaker
from .events import Events
from .link import Link
from .log import logger
from .notes import Note
from .settings import Settings
from .wire import Message, Tensor

__all__ = ["GuardProducer"]

UNSENT = "unsent"
FIRST_WAIT_S = 3.0
"""Before the first acknowledgement over a way that has just opened: NIXL makes its connections then."""
OUTCOMES = {"ok": "delivered", UNSENT: UNSENT}
"""By the acknowledgement's status; any other means that the PD refused it."""


class GuardProducer(RblnECNixlConnectorWorker):  # type: ignore[misc]  # vLLM is not where types are checked
    """The vendor's worker with a link of our own in place of its PUSH socket."""

    def __init__(
        self,
        vllm_config: Any,
        role: Any,
        settings: Settings,
        speaker: Speaker,
        events: Events,
    ) -> None:
        self._guard = settings
        self._speaker = speaker
        self._events = events
        self._step: dict[str, None] = {}
        """Hashes published in this step."""
        self._outcome: dict[str, str] = {}
        self._greeted = False
        """Whether the PD has acknowledged anything since the link opened."""
        super().__init__(vllm_config, role)
        self._push_sock.close(linger=0)
        self._link = Link(
            self._zmq_ctx,
            self._push_addr,
            crc=settings.crc,
            on_state=self._turned,
            on_sent=self._sent,
            tick=self._tick,
        )
        speaker.state = lambda: [self._link_note(up=self._link.up)]
        self._link_thread = threading.Thread(
            target=self._link.run, args=(self._stop_event,), daemon=True, name="ec_guard_link"
        )
        self._link_thread.start()

    # on the link's thread

    def _tick(self) -> None:
        self._speaker.tick()
        self._events.flush()

    @staticmethod
    def _link_note(*, up: bool) -> Note:
        return Note("link", text="up" if up else "down", at=time.time())

    def _turned(self, up: bool) -> None:
        self._greeted = False
        self._speaker.say(self._link_note(up=up))

    def _sent(self, message: Message, sent: bool) -> None:
        if sent:
            self._events.tell("push", message.mm_hash, peer=self._push_addr, nbytes=message.tensor.nbytes)
            return
        self._events.tell("fail", message.mm_hash, peer=self._push_addr, text="not sent: no PD")
        with suppress(queue.Full):  # then the engine's thread does not wait either
            self._incoming_acks.put_nowait(ECNixlAck(message.mm_hash, self._engine_id, UNSENT))

    # on the engine's thread

    @calm(lambda: None)
    def start_save_caches(self, encoder_cache: dict[str, Any] | None = None, **_: object) -> None:
        """Publish again what requests of this step need and the encoder still holds: it encodes nothing."""
        self._drain_acks()
        for mm_hash in getattr(self._connector_metadata, "step_hashes", ()):
            if encoder_cache is not None and mm_hash in encoder_cache:
                if mm_hash in self._registered_caches:
                    self._push(mm_hash)
                else:
                    self._publish(mm_hash, encoder_cache[mm_hash])

    @calm(lambda: None)
    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **_: object) -> None:
        """Publish what was encoded just now."""
        self._drain_acks()
        # Encoded anew: what is held under that hash may be something else by now.
        self._evict_producer_entry(mm_hash)
        self._publish(mm_hash, encoder_cache[mm_hash])

    def _publish(self, mm_hash: str, output: Any) -> None:
        flat = output.detach().cpu()
        held = aligned_tensor(flat.numel()).reshape(flat.shape)
        held.copy_(flat)
        self._admit_producer_entry()
        nbytes = held.numel() * held.element_size()
        registered = self._nixl_agent.get_reg_descs([(held.data_ptr(), nbytes, 0, "")], "DRAM")
        self._nixl_agent.register_memory(registered, backends=self._backends)
        self._registered_caches[mm_hash] = held
        self._registered_descs[mm_hash] = registered
        self._registered_timestamps[mm_hash] = time.monotonic()
        self._events.tell("save", mm_hash, nbytes=nbytes)
        self._push(mm_hash)

    def _push(self, mm_hash: str) -> None:
        held = self._registered_caches[mm_hash]
        info = Tensor(
            base_addr=held.data_ptr(),
            nbytes=held.numel() * held.element_size(),
            device_id=0,
            shape=list(held.shape),
            dtype_str=str(held.dtype),
        )
        self._outcome.pop(mm_hash, None)
        self._step[mm_hash] = None
        message = Message(
            engine_id=self._engine_id,
            mm_hash=mm_hash,
            agent_metadata=self._nixl_agent.get_agent_metadata(),
            tensor=info,
            ack_host=self._ack_host,
            ack_port=self._ack_port,
        )
        self._link.publish(message, held)

    @calm(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:  # noqa: ARG002
        """Wait a little for the PD's word on what was published; tell the scheduler what became of it."""
        wait_s = self._guard.delivery_wait_s
        if wait_s and not self._greeted:
            wait_s = max(wait_s, FIRST_WAIT_S)
        deadline = time.monotonic() + wait_s
        while any(h not in self._outcome for h in self._step):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                self._settle(self._incoming_acks.get(timeout=left))
            except queue.Empty:
                break
        for mm_hash in self._step:
            outcome = self._outcome.pop(mm_hash, "pushed")
            self._speaker.say(Note("outcome", mm_hash, outcome, time.time()))
        self._step.clear()
        return None, None

    def _drain_acks(self) -> None:
        while True:
            try:
                ack = self._incoming_acks.get_nowait()
            except queue.Empty:
                return
            self._settle(ack)

    def _settle(self, ack: ECNixlAck) -> None:
        mm_hash = ack.mm_hash
        outcome = OUTCOMES.get(ack.status, "refused")
        if mm_hash in self._step:
            self._outcome[mm_hash] = outcome
        if outcome != UNSENT:
            self._greeted = True
            self._events.tell("ack", mm_hash, peer=ack.consumer_engine_id, text=outcome)
            if mm_hash in self._registered_caches:
                logger.debug("EC Nixl: ACK status=%s for mm_hash=%s, evicting", ack.status, mm_hash)
                self._evict_producer_entry(mm_hash)

    def _evict_producer_entry(self, mm_hash: str) -> None:
        if mm_hash in self._registered_caches:
            self._events.tell("evict", mm_hash)
        super()._evict_producer_entry(mm_hash)

    @calm(lambda: None)
    def shutdown(self) -> None:
        """At the end."""
        self._stop_event.set()
        self._link.wake()
        self._link_thread.join(timeout=3.0)
        super().shutdown()
        self._speaker.close()
        self._events.close()

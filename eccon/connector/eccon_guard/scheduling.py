"""The engine's side: lets a request pass when its items are at hand, fails it alone when they will not come.

On an encoder: lets it pass when the way to the PD is open, and says in its answer what became of the push.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_rbln.distributed.ec_transfer.ec_connector.rbln_ec_nixl_connector import (
    ECNixlConnectorMetadata,
    MMMeta,
    RblnECNixlConnectorScheduler,
)

from .calm import calm
from .channel import Listener
from .events import Events
from .gate import Gate
from .log import logger
from .notes import Board
from .settings import Settings, request_wait

if TYPE_CHECKING:
    from .check import Level

__all__ = ["GuardMetadata", "GuardScheduler"]

IDLE_S = 0.002
"""Rest of an engine's step in which nothing runs but something waits: without it such steps fill a core."""
WANTED_EVERY_S = 2.0
"""How often the worker is told anew what unfinished requests want."""
LINK = "the way to the PD"


@dataclass
class GuardMetadata(ECNixlConnectorMetadata):  # type: ignore[misc]  # vLLM is not where types are checked
    """What a step's worker is told."""

    gated: bool = False
    """Whether no request passes before its items are there: then nothing is to be waited for."""
    step_hashes: list[str] = field(default_factory=list)
    """Encoder: items of the requests that begin in this step."""
    wanted: tuple[str, ...] = ()
    """PD, now and then: items of requests that have not ended; their time in the store begins anew."""


class GuardScheduler(RblnECNixlConnectorScheduler):  # type: ignore[misc]
    """All on the engine's thread."""

    def __init__(
        self,
        vllm_config: Any,
        role: Any,
        settings: Settings,
        listener: Listener,
        board: Board,
        events: Events,
        level: "Level",
    ) -> None:
        super().__init__(vllm_config, role)
        self._settings = settings
        self._listener = listener
        self._board = board
        self._events = events
        self._gated = level in {"gate", "wrap"}
        self._gate = Gate()
        self._asked: dict[str, dict[str, int]] = {}
        self._users: dict[str, set[str]] = {}
        self._used: dict[str, set[str]] = {}
        self._wanted: dict[str, tuple[str, ...]] = {}
        self._wanted_at = 0.0
        self._answered: tuple[Any, dict[str, Any] | None] = (None, None)

    # a request may be scheduled?

    @calm(lambda: True)
    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """False while an item that this request needs beyond `num_computed_tokens` is not at hand."""
        if not request.mm_features or request.status.name == "RUNNING":
            return True  # what runs has passed
        self._listen()
        missing: list[str] = []
        lost = ""
        if self.is_producer:
            if not self._board.link_up:
                missing.append(LINK)
        else:
            for feature in request.mm_features:
                place = feature.mm_position
                zeros = feature.identifier in self._board.placeholders  # computed may be from those
                if not zeros and place.offset + place.length <= num_computed_tokens:
                    continue
                reason = self._board.bad(feature.identifier)
                if reason:
                    lost = f"{feature.identifier}: {reason}"
                if reason or not self._board.staged(feature.identifier):
                    missing.append(feature.identifier)
        request_id = request.request_id
        self._want(request)
        if missing and self._gate.first_seen(request_id):
            self._events.tell("defer", "" if missing[0] == LINK else missing[0], text=request_id)
        wait_s = request_wait(getattr(request, "ec_transfer_params", None), self._settings.wait_s)
        return self._gate.check(request_id, missing, lost, wait_s)

    @calm(set)
    def take_unavailable_requests(self) -> set[str]:
        """Requests that the scheduler is to fail now."""
        self._listen()
        failed = self._gate.take()
        for request_id, reason in failed.items():
            logger.warning("EC guard: request %s fails: %s", request_id, reason)
            self._events.tell("fail", text=f"{request_id}: {reason}")
        return set(failed)

    def _listen(self) -> None:
        for note in self._listener.drain():
            self._board.take(note)
            if note.kind == "placeholder":
                for request_id in self._users.get(note.mm_hash, ()):
                    self._gate.fail(request_id, f"{note.mm_hash} was missing in its step: {note.text}")

    def _want(self, request: Any) -> None:
        if self.is_consumer and request.request_id not in self._wanted:
            self._wanted[request.request_id] = tuple(f.identifier for f in request.mm_features)

    # what a step's worker is told

    @calm(lambda: None)
    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """An item is to be loaded in this step, or, as vllm-rbln does it, in a later one."""
        if self.is_consumer:
            self._want(request)
            feature = request.mm_features[index]
            asked = self._asked.setdefault(request.request_id, {})
            asked[feature.identifier] = request.get_num_encoder_embeds(index)

    @calm(GuardMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> GuardMetadata:
        """Items of the requests that are scheduled in this step; those of mere waiters are not loaded."""
        meta = GuardMetadata(gated=self._gated)
        asked, self._asked = self._asked, {}
        for request_id, items in asked.items():
            if request_id not in scheduler_output.num_scheduled_tokens:
                continue
            for mm_hash, tokens in items.items():
                meta.mm_datas_to_load.append(MMMeta.make_meta(mm_hash, tokens))
                self._users.setdefault(mm_hash, set()).add(request_id)
                self._used.setdefault(request_id, set()).add(mm_hash)
        new_items = [
            (new.req_id, f.identifier)
            for new in scheduler_output.scheduled_new_reqs
            for f in new.mm_features or ()
        ]
        if self.is_producer:
            meta.step_hashes = [mm_hash for _, mm_hash in new_items]
        elif not self._gated:
            self._refuse_zeros(new_items)
        if self._wanted and (now := time.monotonic()) - self._wanted_at > WANTED_EVERY_S:
            self._wanted_at = now
            meta.wanted = tuple({h for hashes in self._wanted.values() for h in hashes})
        if self._gate.waiting and not scheduler_output.total_num_scheduled_tokens:
            time.sleep(IDLE_S)
        return meta

    def _refuse_zeros(self, new_items: list[tuple[str, str]]) -> None:
        """Nobody asked before these were scheduled: what may be computed of zeros fails, or is marked."""
        for request_id, mm_hash in new_items:
            if mm_hash in self._board.placeholders:
                self._used.setdefault(request_id, set()).add(mm_hash)
                self._gate.fail(request_id, f"{mm_hash}: {self._board.bad(mm_hash)}")

    # the end of a request

    @calm(lambda: (False, None))
    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """What the answer carries as `ec_transfer_params`. vllm-rbln asks twice and keeps the second."""
        request_id = request.request_id
        if request is self._answered[0]:
            return False, self._answered[1]
        self._listen()
        told = self._outcomes(request) if self.is_producer else self._placeholders(request_id)
        self._gate.forget(request_id)
        self._asked.pop(request_id, None)
        self._wanted.pop(request_id, None)
        for mm_hash in self._used.pop(request_id, ()):
            users = self._users.get(mm_hash, set())
            users.discard(request_id)
            if not users:
                self._users.pop(mm_hash, None)
        answer = {"ec_guard": told} if told else None
        self._answered = request, answer
        return False, answer

    def _outcomes(self, request: Any) -> dict[str, str]:
        since = float(getattr(request, "arrival_time", 0.0) or 0.0)
        return {f.identifier: self._board.outcome(f.identifier, since) for f in request.mm_features or ()}

    def _placeholders(self, request_id: str) -> dict[str, str]:
        used = self._used.get(request_id, ())
        return {mm_hash: "placeholder" for mm_hash in used if mm_hash in self._board.placeholders}

    def shutdown(self) -> None:
        """At the end."""
        self._listener.close()
        self._events.close()

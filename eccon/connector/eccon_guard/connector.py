"""What vLLM loads by `ec_connector_module_path`: the vendor's connector with a guard, or without."""

from pathlib import Path
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm_rbln.distributed.ec_transfer.ec_connector import rbln_ec_nixl_connector as vendor

from .channel import Listener, Speaker, meeting_place
from .check import Level, Verdict, decide, versions
from .events import Events
from .log import logger
from .notes import Board
from .settings import Settings
from .wrap import install

__all__ = ["EcconGuardConnector"]

MEANING = {
    "gate": "vLLM asks before it schedules",
    "wrap": "the scheduler was made to ask before it schedules",
    "hooks": "a missing item stalls the engine for guard_wait_s, then fails its request alone",
    "vendor": "the vendor's connector as it is: a lost item ends the PD",
}


class EcconGuardConnector(vendor.RblnECNixlConnector):  # type: ignore[misc]  # vLLM is not where types are checked
    """One in the scheduler, one in the worker; both come to the same level from the same facts."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        transfer = vllm_config.ec_transfer_config
        settings, faults = Settings.read(transfer.ec_connector_extra_config)
        is_scheduler = role == ECConnectorRole.SCHEDULER
        if is_scheduler:
            for line in faults:
                logger.warning("EC guard: %s", line)
        verdict = _verdict(vllm_config, settings)
        try:
            path = meeting_place(settings.channel_directories, str(transfer.engine_id))
        except OSError as e:
            verdict = Verdict("vendor", f"no channel between scheduler and worker: {e}")
        self.guard_level: Level = verdict.level
        """The level in force."""
        if verdict.level == "vendor":
            super().__init__(vllm_config, role)
        else:
            ECConnectorBase.__init__(self, vllm_config=vllm_config, role=role)
            events = Events(settings.events, settings.name, verdict.level)
            make = _scheduler_half if is_scheduler else _worker_half
            self._impl = make(vllm_config, role, settings, path, events, verdict)
        if is_scheduler:
            _announce(verdict, transfer.ec_role)
        logger.info("EcconGuardConnector created (role=%s)", role.name)

    # hooks that the vendor's class does not pass on

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether a request may be scheduled now."""
        return bool(self._impl.ensure_cache_available(request, num_computed_tokens))

    def take_unavailable_requests(self) -> set[str]:
        """Requests that are to be failed now."""
        return set(self._impl.take_unavailable_requests())

    def start_save_caches(self, **kwargs: Any) -> None:
        """An encoder's step begins."""
        self._impl.start_save_caches(**kwargs)

    def update_state_after_free(self, request: Any, index: int) -> None:
        """An encoder cache entry was released."""
        self._impl.update_state_after_free(request, index)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """What a step's end brings."""
        sending, receiving = self._impl.get_finished(finished_req_ids)
        return sending, receiving

    def bind_connector_metadata(self, metadata: ECConnectorMetadata) -> None:
        """What the scheduler says about the step that begins."""
        self._impl.bind_connector_metadata(metadata)

    def shutdown(self) -> None:
        """At the end."""
        self._impl.shutdown()


# These halves import what the check looks for: late, so that a vendor that lacks it can still be loaded.


def _scheduler_half(
    vllm_config: Any, role: ECConnectorRole, settings: Settings, path: Path, events: Events, verdict: Verdict
) -> Any:
    from .scheduling import GuardScheduler  # noqa: PLC0415

    if verdict.level == "wrap":
        install(_scheduler_class(vllm_config))
    return GuardScheduler(vllm_config, role, settings, Listener(path), Board(), events, verdict.level)


def _worker_half(
    vllm_config: Any, role: ECConnectorRole, settings: Settings, path: Path, events: Events, verdict: Verdict
) -> Any:
    from .consumer import GuardConsumer  # noqa: PLC0415
    from .producer import GuardProducer  # noqa: PLC0415

    worker = GuardConsumer if vllm_config.ec_transfer_config.ec_role == "ec_consumer" else GuardProducer
    made = worker(vllm_config, role, settings, Speaker(path), events)
    events.tell("level", text=verdict.reason)
    return made


def _scheduler_class(vllm_config: Any) -> Any:
    return vllm_config.scheduler_config.get_scheduler_cls()


def _verdict(vllm_config: Any, settings: Settings) -> Verdict:
    try:
        from vllm.v1.core.sched.request_queue import FCFSRequestQueue  # noqa: PLC0415

        return decide(
            settings,
            versions(),
            vendor,
            ECConnectorBase,
            _scheduler_class(vllm_config),
            FCFSRequestQueue,
            role=str(vllm_config.ec_transfer_config.ec_role),
            workers=vllm_config.parallel_config.world_size,
        )
    except Exception as e:  # noqa: BLE001  a version in which even looking fails is one that was not tried
        return Verdict("vendor", f"the check failed: {type(e).__name__}: {e}")


def _announce(verdict: Verdict, role: str) -> None:
    line = "EC guard: level=%s role=%s: %s%s"
    because = f" ({verdict.reason})" if verdict.reason else ""
    say = logger.warning if verdict.level in {"hooks", "vendor"} else logger.info
    say(line, verdict.level, role, MEANING[verdict.level], because)

"""How fast the stand-in is, by `ECCON_SIM_*` in the environment: never by flags, which are vLLM's alone."""

import os

import msgspec

__all__ = ["TunableError", "Tunables", "load"]


class TunableError(Exception):
    """An `ECCON_SIM_*` variable holds something else than a number in its range; the message names it."""


class Tunables(msgspec.Struct, frozen=True, kw_only=True):
    """All times are in seconds and already multiplied by `scale`."""

    scale: float = 1.0
    """ECCON_SIM_TIME_SCALE: multiplies every time here and the connector's own (30 s wait, 60 s TTL, ...)."""
    start_s: float = 4.0
    """ECCON_SIM_START_S: from the process's start to its listening socket."""
    encode_s: float = 0.04
    """ECCON_SIM_ENCODE_MS: for each item, whatever its size."""
    encode_s_per_mpix: float = 0.25
    """ECCON_SIM_ENCODE_MS_PER_MPIX: on top, for a million pixels as the visual encoder gets them."""
    prefill_s: float = 0.06
    """ECCON_SIM_PREFILL_MS: one prefill, while which nothing else goes on."""
    token_s: float = 0.015
    """ECCON_SIM_TOKEN_MS: one decode step of the whole batch."""
    batch: int | None = None
    """ECCON_SIM_BATCH: slots of the PD; None: --max-num-seqs, or the compiled model's batch size."""
    cache_tokens: int | None = None
    """ECCON_SIM_CACHE_TOKENS: room of the engine's encoder cache, in tokens. None: as vLLM computes it.
    0: nothing outlives its request, as with vllm-rbln's scheduler."""

    def scaled(self, seconds: float) -> float:
        """One of the protocol's own times."""
        return seconds * self.scale


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        msg = f"{name}={text!r}: must be a number, 0 or more"
        raise TunableError(msg)
    return value


def _count(name: str, least: int) -> int | None:
    if not os.environ.get(name):
        return None
    value = _number(name, 0)
    if value < least or value != int(value):
        msg = f"{name}={os.environ[name]!r}: must be a whole number, {least} or more"
        raise TunableError(msg)
    return int(value)


def load() -> Tunables:
    """Read the environment.

    Raises:
        TunableError: a variable is no number, or out of range.
    """
    scale = _number("ECCON_SIM_TIME_SCALE", 1.0)
    d = Tunables()
    return Tunables(
        scale=scale,
        start_s=scale * _number("ECCON_SIM_START_S", d.start_s),
        encode_s=scale * _number("ECCON_SIM_ENCODE_MS", d.encode_s * 1e3) / 1e3,
        encode_s_per_mpix=scale * _number("ECCON_SIM_ENCODE_MS_PER_MPIX", d.encode_s_per_mpix * 1e3) / 1e3,
        prefill_s=scale * _number("ECCON_SIM_PREFILL_MS", d.prefill_s * 1e3) / 1e3,
        token_s=scale * _number("ECCON_SIM_TOKEN_MS", d.token_s * 1e3) / 1e3,
        batch=_count("ECCON_SIM_BATCH", 1),
        cache_tokens=_count("ECCON_SIM_CACHE_TOKENS", 0),
    )

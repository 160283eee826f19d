"""The lines that vLLM prints while it starts, in its order, spread over the time the start takes."""

import logging
import sys
import time

from eccon.sim.flags import Serve
from eccon.sim.modeldir import Model
from eccon.sim.release import release
from eccon.sim.tunables import Tunables

__all__ = ["Engine", "banner", "routes", "serving"]

SHARDS = 4
ROUTES = (
    ("/openapi.json", "HEAD, GET"),
    ("/docs", "HEAD, GET"),
    ("/load", "GET"),
    ("/version", "GET"),
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/v1/models", "GET"),
    ("/ping", "GET"),
    ("/ping", "POST"),
    ("/v1/chat/completions", "POST"),
)


def banner(serve: Serve) -> None:
    """First of all: version, model, and what was asked for."""
    log = logging.getLogger("vllm.entrypoints.serve.utils.api_utils")
    if release().banner:
        _drawing(log, serve)
    else:
        told = "vLLM server version %s, serving model %s"
        logging.getLogger("vllm.entrypoints.launchers.launcher").info(told, release().version, serve.model)
    log.info("non-default args: %s", serve.non_default)


def _drawing(log: logging.Logger, serve: Serve) -> None:
    for line in (
        "",
        "       █     █     █▄   ▄█",
        f" ▄▄ ▄█ █     █     █ ▀▄▀ █  version {release().version}",
        f"  █▄█▀ █     █     █     █  model   {serve.model}",
        "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀",
        "",
    ):
        log.info(line)


def config(model: Model, max_model_len: int) -> None:
    """The model's configuration was read."""
    log = logging.getLogger("vllm.config.model")
    log.info("Resolved architecture: %s", model.architecture)
    log.info("Using max model len %d", max_model_len)


class Engine:
    """What the engine says; each call also takes its share of the start's time."""

    def __init__(self, serve: Serve, model: Model, tunables: Tunables) -> None:
        self._serve = serve
        self._model = model
        self._tunables = tunables
        self._began = time.monotonic()

    def _spend(self, share: float) -> None:
        time.sleep(self._tunables.start_s * share)

    def initializing(self) -> None:
        """The engine's process is up."""
        self._spend(0.35)
        logging.getLogger("vllm.v1.engine.core").info(
            "Initializing a V1 LLM engine (v%s) with config: model='%s', served_model_name=%s, dtype=%s",
            release().version,
            self._serve.model,
            self._serve.served_names[0],
            "torch.float16",
        )
        self._spend(0.15)

    def connector(self, engine_id: str) -> None:
        """Said before the connector is made, for each of its two halves."""
        logging.getLogger("vllm.distributed.ec_transfer.ec_connector.factory").info(
            "Creating connector with name: %s and engine_id: %s", "RblnECNixlConnector", engine_id
        )

    def weights(self) -> None:
        """Weights are loaded, shard by shard; an encoder loads the visual part alone."""
        logging.getLogger("vllm.v1.worker.model_runner").info(
            "Starting to load model %s...", self._serve.model
        )
        began = time.monotonic()
        for done in range(SHARDS + 1):
            if done:
                self._spend(0.3 / SHARDS)
            rate = "?it/s" if not done else f"{done / max(1e-3, time.monotonic() - began):.2f}it/s"
            line = f"\rLoading safetensors checkpoint shards: {done * 100 // SHARDS:3d}% Completed | "
            line += f"{done}/{SHARDS} [00:00<{'00:00' if done else '?'}, {rate}]"
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        took = time.monotonic() - began
        logging.getLogger("vllm.model_executor.model_loader.default_loader").info(
            "Loading weights took %.2f seconds", took
        )

    def kv_cache(self, slots: int) -> None:
        """Room for the KV cache, which an encoder has none of, and the end of the engine's part."""
        self._spend(0.2)
        if self._serve.role != "producer":
            size = slots * self._model.max_model_len
            logging.getLogger("vllm.v1.core.kv_cache_utils").info(
                "RBLN KV cache size: %s tokens, Maximum concurrency for %s tokens per request: %.2fx",
                f"{size:,}",
                f"{self._model.max_model_len:,}",
                float(slots),
            )
        logging.getLogger("vllm.v1.engine.core").info(
            "init engine (profile, create kv cache, warmup model) took %.2f s", time.monotonic() - self._began
        )


def serving(host: str, port: int) -> None:
    """The engine is ready; the server is about to listen."""
    log = logging.getLogger("vllm.entrypoints.launchers.entry")
    log.info("Supported tasks: ['generate']")
    log.info("Starting vLLM server on http://%s:%d", host, port)


def routes() -> None:
    """What can be asked for."""
    log = logging.getLogger("vllm.entrypoints.launchers.launcher")
    log.info("Available routes are:")
    for path, methods in ROUTES:
        log.info("Route: %s, Methods: %s", path, methods)

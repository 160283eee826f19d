"""What the contract is tested on: servers to start, stop and kill, whose logs can be read."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from eccon.lab.cluster import MODULE_PATH, ONE_ENGINE, environment
from eccon.lab.place import Place, default
from eccon.launch import logging_config, versions

__all__ = ["MODEL", "LabTarget", "Server", "SimTarget", "Target", "free_port", "until"]

MODEL = "m"
"""Name under which every target serves."""
FLAGS = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--max-model-len", "4096", "--max-num-seqs", "4"),
    *("--limit-mm-per-prompt", '{"image":8,"video":0}', "--mm-processor-kwargs", '{"max_pixels":802816}'),
)


def free_port() -> int:
    """A TCP port that nobody had a moment ago, below those that the system gives out by itself.

    vLLM binds its port with SO_REUSEADDR and does not listen until it is ready: in the meantime the system
    may give the same port to a ZeroMQ socket that asks for any, and the server is never heard of (seen).
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Wait for a condition; fails with `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout} s: {what}"
        time.sleep(0.01)


class Server:
    """One `vllm serve`, in a session of its own so that whatever it leaves behind is found."""

    def __init__(
        self, argv: Sequence[str], env: dict[str, str], port: int, log: Path, patience: float
    ) -> None:
        self.port = port
        self.log_path = log
        self.patience = patience
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self.pid = self._process.pid

    def log(self) -> str:
        """Everything it has written so far."""
        return self.log_path.read_text(errors="replace")

    def events(self, about: str = "") -> list[str]:
        """The connector's messages, in order; with `about` those that contain it."""
        found = re.findall(r"EC Nixl: ([^\n]*)", self.log())
        return [e for e in found if about in e]

    def wait_event(self, text: str, timeout: float = 30) -> None:
        """Until the connector has said so."""
        until(lambda: bool(self.events(text)), timeout, f"no event {text!r} in {self.events()[-5:]}")

    def wait_log(self, pattern: str) -> None:
        """Until its log matches; as long as for a start, since it may speak of one."""
        until(
            lambda: re.search(pattern, self.log()) is not None,
            self.patience,
            f"{pattern!r} is not in its log: {self.log()[-500:]}",
        )

    def listening(self) -> bool:
        """Whether its port takes connections."""
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def wait_ready(self) -> None:
        """Until it listens, which it does once it is ready."""

        def ready() -> bool:
            assert self._process.poll() is None, f"died at start: {self.log()[-2000:]}"
            return self.listening()

        until(ready, self.patience, "not ready")

    def alive(self) -> bool:
        """Whether its first process lives."""
        return self._process.poll() is None

    def exit_code(self, timeout: float) -> int:
        """Wait for its end."""
        return self._process.wait(timeout)

    def family(self) -> list[psutil.Process]:
        """Every living process of its session."""
        found = []
        for p in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(p.pid) != self.pid:
                    continue
                # A killed process is a zombie as soon as its first thread is; while others end, its sockets
                # are open still, and whoever connects to them is let in.
                if p.status() != psutil.STATUS_ZOMBIE or p.num_threads() > 1:
                    found.append(p)
        return found

    def engine(self) -> psutil.Process:
        """Its EngineCore."""
        return next(p for p in self.family() if p.cmdline()[0] == "VLLM::EngineCore")

    def signal(self, number: signal.Signals, *, everyone: bool = False) -> None:
        """To its first process, or to all of its session."""
        for pid in [p.pid for p in self.family()] if everyone else [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def destroy(self) -> None:
        """SIGKILL to all of it."""
        self.signal(signal.SIGKILL, everyone=True)
        self._process.wait(20)
        until(lambda: not self.family(), 20, "it cannot be killed")

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what does not go."""
        self.signal(signal.SIGCONT, everyone=True)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self.destroy()


class Target(ABC):
    """A way to start `vllm serve`. Servers that it started are gone when it is closed."""

    scale: float
    """Of the protocol's own times."""
    start_s: float
    """Patience for a start."""
    version: str
    """Of vLLM."""
    guarded = False
    """Whether its servers have the guarded connector."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._servers: list[Server] = []
        self._logging = directory / "logging.json"
        self._logging.write_text(json.dumps(logging_config(named=self.release.names_records)))

    @property
    def release(self) -> versions.Vllm:
        """What this version does where versions differ."""
        return versions.vllm(self.version)

    @property
    @abstractmethod
    def command(self) -> list[str]:
        """Up to and with `serve`."""

    @property
    @abstractmethod
    def model(self) -> str:
        """What is served."""

    def environment(self) -> dict[str, str]:
        """Of every server."""
        return os.environ | {"VLLM_LOGGING_CONFIG_PATH": str(self._logging)}

    def flags(self) -> list[str]:
        """Beside those that every target gets."""
        return []

    def connector(self) -> dict[str, Any]:
        """Keys of `--ec-transfer-config` that every server gets."""
        return {"ec_connector": "RblnECNixlConnector"}

    def launch(
        self,
        name: str,
        role: str,
        extra: dict[str, Any],
        *flags: str,
        port: int | None = None,
        env: dict[str, str] | None = None,
        model: str | None = None,
    ) -> Server:
        """Start one, and do not wait for it."""
        port = port or free_port()
        transfer = self.connector() | {"ec_role": role, "ec_connector_extra_config": extra}
        argv = [*self.command, model or self.model, "--port", str(port), *FLAGS, *self.flags()]
        argv += ["--ec-transfer-config", json.dumps(transfer), *flags]
        log = self.directory / f"{name}-{len(self._servers)}.log"
        server = Server(argv, self.environment() | (env or {}), port, log, self.start_s)
        self._servers.append(server)
        return server

    def pd(self, pull_port: int, *flags: str, env: dict[str, str] | None = None, **extra: Any) -> Server:
        """A PD."""
        where = {"pull_host": "127.0.0.1", "pull_port": pull_port}
        return self.launch("pd", "ec_consumer", where | extra, *flags, env=env)

    def encoder(self, pull_port: int, *flags: str, env: dict[str, str] | None = None, **extra: Any) -> Server:
        """An encoder that pushes to the PD of that port."""
        where = {"llm_host": "127.0.0.1", "llm_pull_port": pull_port, "producer_cache_ttl_s": 600}
        return self.launch("encoder", "ec_producer", where | extra, *flags, env=env)

    def protocol_s(self, seconds: float) -> float:
        """One of the protocol's times, on this target."""
        return seconds * self.scale

    def close(self) -> None:
        """Kill what is left."""
        for server in self._servers:
            server.destroy()

    @contextlib.contextmanager
    def lent(self, *servers: Server) -> Iterator[None]:
        """Ready for the block, stopped after it."""
        try:
            for server in servers:
                server.wait_ready()
            yield
        finally:
            for server in servers:
                server.stop()


class SimTarget(Target):
    """The stand-in, thirty times as fast, as the release that ECCON_SIM_VLLM names."""

    scale = 0.03
    start_s = 20.0
    version = os.environ.get("ECCON_SIM_VLLM") or "0.30.0"

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "eccon.sim", "serve"]

    @property
    def model(self) -> str:
        import eccon.sim

        return str(Path(eccon.sim.__file__).parent / "model")

    def environment(self) -> dict[str, str]:
        told = {
            "ECCON_SIM_VLLM": self.version,
            "ECCON_SIM_TIME_SCALE": str(self.scale),
            "ECCON_SIM_START_S": "0",
        }
        return super().environment() | told


class LabTarget(Target):
    """Real vLLM on CPU with the real connector: what `eccon lab setup` made in ECCON_LAB."""

    scale = 1.0
    start_s = 400.0

    def __init__(self, directory: Path) -> None:
        self._place = Place(default())
        assert self._place.vllm.exists(), f"no lab in {self._place.root}: eccon lab setup"
        self.version = self._place.version()
        super().__init__(directory)

    @property
    def command(self) -> list[str]:
        return [str(self._place.vllm), "serve"]

    @property
    def model(self) -> str:
        return str(self._place.model)

    def flags(self) -> list[str]:
        return [*ONE_ENGINE, "--enforce-eager", "--dtype", "float16", "--num-gpu-blocks-override", "512"]

    def connector(self) -> dict[str, Any]:
        return super().connector() | {"ec_connector_module_path": MODULE_PATH}

    def environment(self) -> dict[str, str]:
        return super().environment() | environment(self._place)

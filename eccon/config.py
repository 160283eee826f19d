"""`eccon.toml` to a `Topology`: strict, and every error says file, line, key, value, reason and what to do.

The file is `-f FILE`, else `ECCON_CONFIG`, else `./eccon.toml`. Its `name` is the cluster's. A variable
`ECCON__TABLE__KEY` (as `ECCON__PD__PORT=19200`) stands in place of what the file says.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from eccon import strict
from eccon.tomltext import Text, TextError

__all__ = [
    "ClusterFile",
    "Compile",
    "ConfigError",
    "Connector",
    "Devices",
    "EncoderOverride",
    "Encoders",
    "Launcher",
    "Limits",
    "Model",
    "Pd",
    "Proxy",
    "Scalar",
    "Supervisor",
    "Topology",
    "check",
    "cluster_name",
    "find",
    "load",
    "parse",
    "read",
]

Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1e8)]
Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Device: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=-1)]
Url: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^(https?://[^\s/?#@]+(:\d+)?/?)?$")]
CpuList: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$")]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Variables: TypeAlias = dict[Annotated[str, msgspec.Meta(pattern=r"^[^=]+$")], str]
Scalar: TypeAlias = str | int | float | bool | list[str]
Extra: TypeAlias = dict[str, Scalar]


class ConfigError(Exception):
    """The configuration cannot be used. The message is complete: one line for each fault."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is served. `path` goes to `vllm serve` as written: it is hashed, and is the served name."""

    path: str
    max_pixels: Annotated[int, msgspec.Meta(ge=1)] | None = 802_816
    """Largest image after resizing, in pixels; the same on PD and encoders (it is not in the hash)."""
    served_name: str = ""
    hub: bool = False
    """`path` names a model of a hub, not a directory on this host."""
    api_key_file: str = ""
    """File with the API key of PD and encoders in its first line; they get it as VLLM_API_KEY."""


class Launcher(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whose `vllm` is run; it is often not in eccon's own environment."""

    kind: Literal["vllm", "sim"] = "vllm"
    """"sim" starts the stand-in of this package instead."""
    vllm: str = "vllm"
    """Path or name of the vllm command."""
    profile: Literal["safe", "guide"] = "safe"
    """"guide" passes exactly the vendor guide's flags; "safe" adds loopback binds and roomier caches."""


class Devices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which variable tells a process its devices."""

    kind: Literal["rbln", "cuda", "none"] = "rbln"


class Connector(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The EC connector between encoders and PD."""

    kind: str = "RblnECNixlConnector"
    module_path: str = ""
    host: str = "127.0.0.1"
    """Where the PD listens for metadata, and encoders connect."""
    port: Port = 19500
    extra: Extra = {}
    """More keys for both sides' `ec_connector_extra_config`."""
    pd_extra: Extra = {}
    """The same for the PD alone."""
    encoder_extra: Extra = {}
    """The same for the encoders alone."""
    transfer: Extra = {}
    """More keys for both sides' `--ec-transfer-config` itself, as `ec_buffer_device`."""
    guard: Literal["auto", "on", "off"] = "auto"
    """Whether RblnECNixlConnector runs guarded, so that the PD survives an encoder's crash; "auto": with the
    versions that it was proven with."""
    guard_wait_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 3.0
    """How long the guarded PD lets a request wait for its items."""
    shared_storage_path: str = ""
    """ECExampleConnector's directory, on this host or shared; empty: one in the cluster's state directory."""


class Pd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prefill and decode: the language model."""

    host: str = "127.0.0.1"
    port: Port = 19100
    devices: list[Device] = []
    args: list[str] = []
    """More arguments of `vllm serve`."""
    env: Variables = {}
    vllm: str = ""
    """Another command than `launcher.vllm`; of the same version."""
    cpus: CpuList = ""
    """CPUs that it is pinned to, as "0-15,32"; empty: any. Each vLLM takes half of those that it sees."""
    external: bool = False
    """Started by somebody else, at `url`: watched and used, never started, stopped or signalled."""
    url: Url = ""


class EncoderOverride(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is different for one encoder. What is left out is as for all of them."""

    index: Annotated[int, msgspec.Meta(ge=0, le=1023)]
    """Which one: 0 is `encoder-0`."""
    device: Device | None = None
    port: Port | None = None
    host: str | None = None
    args: list[str] = []
    """After those of `encoders.args`; of two equal flags vLLM takes the later."""
    env: Variables = {}
    """Over `encoders.env`."""
    vllm: str = ""
    cpus: CpuList = ""
    """In place of its part of `encoders.cpus`."""
    connector_extra: Extra = {}
    """Over `connector.encoder_extra`, as an `ack_host`."""
    external: bool = False
    """As for the PD."""
    url: Url = ""


class Encoders(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The visual encoders: `count` of them on consecutive ports, one device each."""

    count: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    host: str = "127.0.0.1"
    port: Port = 19101
    devices: list[Device] = []
    """In order; those beyond `count` are spares for `eccon add`."""
    args: list[str] = []
    """More arguments of `vllm serve`."""
    env: Variables = {}
    vllm: str = ""
    """Another command than `launcher.vllm`; of the same version."""
    cpus: list[CpuList] = []
    """CPUs of each encoder in order, as for the PD; one that the list does not reach is not pinned."""
    override: list[EncoderOverride] = []

    def overridden(self, index: int) -> EncoderOverride:
        """What is different for the encoder of that index."""
        return next((o for o in self.override if o.index == index), EncoderOverride(index=index))


class Proxy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """eccon-proxy."""

    host: str = "0.0.0.0"
    port: Port = 19000
    settings: Extra = {}
    """Any setting of eccon-proxy, as `policy = "least_inflight"`; `eccon-proxy --help` explains each."""
    api_key_file: str = ""
    """File with a key a line, one of which clients must send; empty: none is asked for."""
    args: list[str] = []
    """More arguments of eccon-proxy."""
    env: Variables = {}
    cpus: CpuList = ""
    """As for the PD."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Resource limits of every process, set before it begins; -1 is none. What is left out is inherited."""

    files: Limit | None = None
    """Open files (RLIMIT_NOFILE)."""
    core_bytes: Limit | None = None
    locked_bytes: Limit | None = None
    """Memory that may be locked (RLIMIT_MEMLOCK)."""
    memory_bytes: Limit | None = None
    """Address space (RLIMIT_AS)."""
    processes: Limit | None = None


class Compile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How `eccon compile` makes the model directory, by optimum-rbln."""

    source: str = "Qwen/Qwen3-VL-8B-Instruct"
    """The model to compile: a hub's name or a directory."""
    devices: Count | None = None
    """NPUs of the language model; left out: as many as `pd.devices`."""
    visual_devices: Count = 1
    """NPUs of the visual encoder."""
    max_seq_len: Count = 32_768
    """Tokens of a request."""
    batch_size: Count = 8
    """Requests at a time."""
    decoder_batch_sizes: list[Count] = []
    """Shapes of a decoding step, as [1, 2, 4, 8]; the smallest that fits is run. Empty: only `batch_size`."""
    visual_max_seq_len: Count | list[Count] = 5440
    """Shapes of the visual encoder, in patches; of several the smallest that fits an image is run."""
    extra: dict[str, Scalar] = {}
    """More options of the language model's `rbln_config`."""
    visual_extra: dict[str, Scalar] = {}
    """The same for the visual encoder's."""


class Supervisor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How processes are started, stopped and watched."""

    start_timeout_s: Seconds = 1800.0
    stop_grace_s: Seconds = 15.0
    drain_timeout_s: Seconds = 20.0
    backoff_s: Seconds = 1.0
    backoff_max_s: Seconds = 60.0
    backoff_reset_s: Seconds = 300.0
    """A life at least this long makes the next death count as the first."""
    failures: Annotated[int, msgspec.Meta(ge=1)] = 5
    """Deaths in a row after which a process is `failed`."""
    restart_stalled_s: Seconds | None = None
    """An encoder that has been stalled this long is restarted by itself; None: it waits for an operator."""
    probe_interval_s: Seconds = 1.0
    probe_timeout_s: Seconds = 2.0
    log_bytes: Annotated[int, msgspec.Meta(ge=4096)] = 16 * 2**20
    """Size at which a log file is rotated."""
    log_files: Annotated[int, msgspec.Meta(ge=1, le=100)] = 4
    limits: Limits = Limits()


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an `eccon.toml` may say."""

    name: Name = "eccon"
    model: Model
    launcher: Launcher = Launcher()
    devices: Devices = Devices()
    connector: Connector = Connector()
    pd: Pd = Pd()
    encoders: Encoders = Encoders()
    proxy: Proxy = Proxy()
    supervisor: Supervisor = Supervisor()
    compile: Compile = Compile()
    env: Variables = {}
    """For every child."""


class Topology(ClusterFile, frozen=True, kw_only=True):
    """A cluster as configured. `path` and `directory` are where it was read from."""

    path: Path = Path()
    directory: Path = Path()
    """Children's working directory, and what `model.path` is relative to."""


def find(explicit: str | None = None) -> Path:
    """The configuration file at hand.

    Raises:
        ConfigError: there is none.
    """
    given = explicit or os.environ.get("ECCON_CONFIG")
    path = Path(given or "eccon.toml").absolute()
    if not path.is_file():
        hint = "" if given else "; `eccon init` writes one, `eccon demo` needs none"
        msg = f"{path}: no such file{hint}"
        raise ConfigError(msg)
    return path


def load(path: Path, *, compiled: bool = True) -> Topology:
    """Reads and checks `path`. Without `compiled` the model directory may be yet to be made.

    Raises:
        ConfigError: what is wrong, with every fault that could be found at once.
    """
    return check(read(path), compiled=compiled)


def read(path: Path) -> Text:
    """Text and values of `path`, with the environment's in place of the file's; not checked yet.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    return _text(_read(path), path)


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as e:
        msg = f"{path}: cannot be read: {e.strerror}"
        raise ConfigError(msg) from e
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw[: e.start].count(b"\n") + 1
        msg = f"{path}:{line}: is not UTF-8"
        raise ConfigError(msg) from e


def cluster_name(path: Path) -> str:
    """Only the cluster's name in `path`: a cluster that runs can be reached though its file is broken now.

    A variable `ECCON__NAME` stands in its place, as everywhere.

    Raises:
        ConfigError: the file cannot be read.
    """
    if name := os.environ.get("ECCON__NAME"):
        return name
    raw = _read(path)
    try:
        return str(Text(raw, path).data.get("name", "eccon"))
    except TextError:
        top = re.split(r"(?m)^\s*\[", raw)[0]
        found = re.search(r"""(?m)^\s*name\s*=\s*["']([A-Za-z0-9._-]+)["']""", top)
        return found[1] if found else "eccon"


def parse(text: str, path: Path) -> Topology:
    """Checks `text` as if read from `path`. Raises ConfigError as `load` does."""
    return check(_text(text, path))


def check(text: Text, *, compiled: bool = True) -> Topology:
    """The topology that `text` describes; `compiled` as for `load`.

    Raises:
        ConfigError: every fault, a line each.
    """
    from eccon.clashes import clashes  # noqa: PLC0415  it knows this module's types

    if "model" not in text.data:
        msg = f"{text.path}: no [model]: nothing to serve; `eccon init` writes a complete example"
        raise ConfigError(msg)
    faults = list(strict.faults(ClusterFile, text))
    if faults:
        raise ConfigError("\n".join(faults))
    said = msgspec.convert(text.data, ClusterFile)
    topology = Topology(
        **{f: getattr(said, f) for f in said.__struct_fields__}, path=text.path, directory=text.path.parent
    )
    faults = list(clashes(topology, text, compiled=compiled))
    if faults:
        raise ConfigError("\n".join(faults))
    return topology


def _text(text: str, path: Path) -> Text:
    try:
        found = Text(text, path)
    except TextError as e:
        raise ConfigError(str(e)) from e
    problems = list(strict.overlay(ClusterFile, found, os.environ))
    if problems:
        raise ConfigError("\n".join(problems))
    return found

"""`eccon.toml` to a `Topology`: strict, and every error says file, line, key, value, reason and what to do.

The file is `-f FILE`, else `ECCON_CONFIG`, else `./eccon.toml`. Its `name` is the cluster's.
"""

import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "ConfigError",
    "Connector",
    "Devices",
    "Encoders",
    "Launcher",
    "Model",
    "Pd",
    "Proxy",
    "Supervisor",
    "Topology",
    "cluster_name",
    "find",
    "load",
    "parse",
]

Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Device: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


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
    extra: dict[str, str | int | float | bool | list[str]] = {}
    """More keys for both sides' `ec_connector_extra_config`."""


class Pd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prefill and decode: the language model."""

    host: str = "127.0.0.1"
    port: Port = 19100
    devices: list[Device] = []
    args: list[str] = []
    env: dict[str, str] = {}


class Encoders(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The visual encoders: `count` of them on consecutive ports, one device each."""

    count: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    host: str = "127.0.0.1"
    port: Port = 19101
    devices: list[Device] = []
    """In order; those beyond `count` are spares for `eccon add`."""
    args: list[str] = []
    env: dict[str, str] = {}


class Proxy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """eccon-proxy."""

    host: str = "0.0.0.0"
    port: Port = 19000
    args: list[str] = []
    env: dict[str, str] = {}


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


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cluster as configured. `path` and `directory` are where it was read from."""

    name: Name = "eccon"
    model: Model
    launcher: Launcher = Launcher()
    devices: Devices = Devices()
    connector: Connector = Connector()
    pd: Pd = Pd()
    encoders: Encoders = Encoders()
    proxy: Proxy = Proxy()
    supervisor: Supervisor = Supervisor()
    env: dict[str, str] = {}
    """For every child."""
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


def load(path: Path) -> Topology:
    """Reads and checks `path`.

    Raises:
        ConfigError: what is wrong, with every fault that could be found at once.
    """
    try:
        raw = path.read_bytes()
    except OSError as e:
        msg = f"{path}: cannot be read: {e.strerror}"
        raise ConfigError(msg) from e
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw[: e.start].count(b"\n") + 1
        msg = f"{path}:{line}: is not UTF-8"
        raise ConfigError(msg) from e
    return parse(text, path)


def cluster_name(path: Path) -> str:
    """Only the cluster's name in `path`: a cluster that runs can be reached though its file is broken now.

    Raises:
        ConfigError: not even that can be read.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as e:
        msg = f"{path}: the cluster's name cannot be read: {e}"
        raise ConfigError(msg) from e
    return str(data.get("name", "eccon"))


def parse(text: str, path: Path) -> Topology:
    """Checks `text` as if read from `path`. Raises ConfigError as `load` does."""
    source = _Source(text.replace("\r\n", "\n"), path)
    try:
        data = tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as e:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(e))
        line, column = found.groups() if found else (str(source.text.count("\n") + 1), "1")
        reason = re.sub(r" \(at .*\)$", "", str(e))
        msg = f"{path}:{line}:{column}: not TOML: {reason}"
        raise ConfigError(msg) from e
    for hidden in ("path", "directory"):
        if hidden in data:
            raise ConfigError(source.fault((hidden,), data[hidden], "unknown key; remove it"))
    if "model" not in data:
        msg = f"{path}: no [model]: nothing to serve; `eccon init` writes a complete example"
        raise ConfigError(msg)
    try:
        topology = msgspec.convert(data, Topology)
    except msgspec.ValidationError as e:
        raise ConfigError(_explain(str(e), data, source)) from e
    topology = msgspec.structs.replace(topology, path=path, directory=path.parent)
    faults = list(_faults(topology, source))
    if faults:
        raise ConfigError("\n".join(faults))
    return topology


class _Source:
    """A configuration's text, and where its keys stand."""

    def __init__(self, text: str, path: Path) -> None:
        self.text = text
        self.path = path

    def line(self, key: tuple[str, ...]) -> int | None:
        """Line of the dotted `key`, or of the nearest table above it; None when neither is written."""
        table: tuple[str, ...] = ()
        best: tuple[int, int] | None = None
        for number, line in enumerate(self.text.split("\n"), 1):
            if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$", line):
                table = _split(header[1])
                here = table
            elif pair := re.match(
                r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"))*)\s*=", line
            ):
                here = table + _split(pair[1])
            else:
                continue
            if here == key[: len(here)] and here and (best is None or len(here) > best[0]):
                best = (len(here), number)
        return best[1] if best else None

    def fault(self, key: tuple[str, ...], value: object, reason: str) -> str:
        """One complete line: where, which key, which value, why."""
        line = self.line(key)
        where = f"{self.path}:{line}" if line else f"{self.path}"
        shown = "" if value is _ABSENT else f" = {_show(value)}"
        return f"{where}: {'.'.join(key)}{shown}: {reason}"


_ABSENT = object()


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _show(value: object) -> str:
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def _explain(message: str, data: Mapping[str, Any], source: _Source) -> str:
    """msgspec's message, in our form."""
    found = re.match(r"(.*?)(?: - at `(key in )?\$?\.?(.*)`)?$", message)
    reason, path = (found[1], found[3] or "") if found else (message, "")
    key = tuple(re.sub(r"\[[^\]]*\]", "", part) for part in path.split(".") if part)
    if unknown := re.match(r"Object contains unknown field `(.*)`", reason):
        full = (*key, unknown[1])
        known = _fields(key)
        near = difflib.get_close_matches(unknown[1], known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return source.fault(full, _value(data, full), f"unknown key; {hint}")
    if missing := re.match(r"Object missing required field `(.*)`", reason):
        return source.fault((*key, missing[1]), _ABSENT, "is required")
    reason = reason.replace("`", "").replace("int", "a whole number").replace("str", "a string")
    return source.fault(key, _value(data, key), reason[:1].lower() + reason[1:])


def _value(data: object, key: tuple[str, ...]) -> object:
    for part in key:
        if not isinstance(data, Mapping) or part not in data:
            return _ABSENT
        data = data[part]
    return data


def _fields(table: tuple[str, ...]) -> list[str]:
    kind: object = Topology
    for part in table:
        kind = Topology.__annotations__.get(part)
    hidden = ("path", "directory") if kind is Topology else ()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [f for f in kind.__struct_fields__ if f not in hidden]
    return []


def _faults(t: Topology, source: _Source) -> Iterator[str]:
    """What no single key shows: clashes between keys, and what the host does not have."""
    model = t.directory / t.model.path
    if not t.model.path:
        yield source.fault(("model", "path"), "", "is empty; give the compiled model's directory")
    elif not t.model.hub and not model.is_dir():
        reason = f"no such directory ({model}); compile the model first, or correct the path"
        yield source.fault(("model", "path"), t.model.path, reason)
    elif not t.model.hub and not (model / "config.json").is_file():
        yield source.fault(("model", "path"), t.model.path, "has no config.json: not a model directory")

    last = t.encoders.port + t.encoders.count - 1
    if last > 65535:
        yield source.fault(
            ("encoders", "port"), t.encoders.port, f"{t.encoders.count} encoders need ports up to {last}"
        )
    taken: dict[int, str] = {}
    for key, port in (
        ("proxy.port", t.proxy.port),
        ("pd.port", t.pd.port),
        ("connector.port", t.connector.port),
    ):
        if port in taken:
            yield source.fault(_split(key), port, f"is {taken[port]} too; give each its own")
        taken.setdefault(port, key)
    for port, key in taken.items():
        if t.encoders.port <= port <= last:
            reason = f"lies among the encoders' ports {t.encoders.port}-{last}; give each its own"
            yield source.fault(_split(key), port, reason)

    if t.devices.kind != "none":
        yield from _device_faults(t, source)


def _device_faults(t: Topology, source: _Source) -> Iterator[str]:
    if not t.pd.devices:
        yield source.fault(("pd", "devices"), _ABSENT, "is required with devices.kind other than none")
    if len(t.encoders.devices) < t.encoders.count:
        reason = f"{t.encoders.count} encoders need {t.encoders.count} devices"
        yield source.fault(("encoders", "devices"), t.encoders.devices, reason)
    owner: dict[int, str] = {}
    for role, devices in (("pd", t.pd.devices), ("encoders", t.encoders.devices)):
        for device in devices:
            if device in owner:
                reason = f"device {device} is in {owner[device]} too; a device serves one process"
                yield source.fault((role, "devices"), devices, reason)
            owner.setdefault(device, role)

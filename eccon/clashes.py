"""What no single key of a configuration shows: clashes between keys, and what the host does not have."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from eccon import strict
from eccon.config import Topology
from eccon.launch import connectors, versions
from eccon.model import Role
from eccon.tomltext import ABSENT, Key, Text
from eccon_proxy.settings import FILE_FIELDS, SECRET_FIELDS, Settings

__all__ = ["LAUNCHED", "clashes", "remarks"]

LAUNCHED = ("host", "port", "encode_servers_urls", "decode_servers_urls", "groups", "admin", "connector")
"""Settings of eccon-proxy that follow from other keys."""


def clashes(t: Topology, text: Text, *, compiled: bool = True) -> Iterator[str]:
    """One complete line for each fault. Without `compiled` the model directory may be yet to be made."""
    if compiled or not t.model.path:
        yield from _model(t, text)
    yield from _compile(t, text)
    yield from _files(t, text)
    yield from _external(t, text)
    yield from _overrides(t, text)
    yield from _devices(t, text)
    yield from _ports(t, text)
    yield from _arguments(t, text)
    yield from _connector(t, text)
    yield from _proxy(t, text)
    yield from _versions(t, text)


def remarks(t: Topology, text: Text) -> Iterator[str]:
    """One complete line for each thing that is no fault, yet may not be meant."""
    count = t.encoders.count
    for i, own in enumerate(t.encoders.override):
        if own.index >= count:
            reason = f"encoders.count is {count}: it waits for `eccon add` to come to encoder-{own.index}"
            yield text.fault(("encoders", "override", i, "index"), own.index, reason)


def _model(t: Topology, text: Text) -> Iterator[str]:
    model = t.directory / t.model.path
    key = ("model", "path")
    if not t.model.path:
        yield text.fault(key, "", "is empty; give the compiled model's directory")
    elif not t.model.hub and not model.is_dir():
        reason = f"no such directory ({model}); compile the model first, or correct the path"
        yield text.fault(key, t.model.path, reason)
    elif not t.model.hub and not (model / "config.json").is_file():
        yield text.fault(key, t.model.path, "has no config.json: not a model directory")


def _compile(t: Topology, text: Text) -> Iterator[str]:
    c = t.compile
    sizes = c.decoder_batch_sizes
    key = ("compile", "decoder_batch_sizes")
    if sizes and (c.batch_size not in sizes or max(sizes) > c.batch_size):
        reason = f"must have batch_size, {c.batch_size}, as its largest"
        yield text.fault(key, sizes, reason)
    if c.visual_max_seq_len == []:
        yield text.fault(("compile", "visual_max_seq_len"), [], "needs at least one length")


def _files(t: Topology, text: Text) -> Iterator[str]:
    for key, name in (
        (("model", "api_key_file"), t.model.api_key_file),
        (("proxy", "api_key_file"), t.proxy.api_key_file),
    ):
        if not name:
            continue
        try:
            if not (t.directory / name).read_text("utf-8").strip():
                yield text.fault(key, name, "is empty; put the key in its first line")
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "is not UTF-8"
            yield text.fault(key, name, f"cannot be read: {why}")


def _external(t: Topology, text: Text) -> Iterator[str]:
    roles: list[tuple[Key, bool, str]] = [(("pd",), t.pd.external, t.pd.url)]
    roles += [(("encoders", "override", i), o.external, o.url) for i, o in enumerate(t.encoders.override)]
    for table, external, url in roles:
        if external and not url:
            yield text.fault((*table, "external"), external, "needs a url, as http://10.0.0.5:19100")
        if url and not external:
            yield text.fault((*table, "url"), url, "is of use only with external = true")


def _overrides(t: Topology, text: Text) -> Iterator[str]:
    seen: set[int] = set()
    for i, own in enumerate(t.encoders.override):
        key: Key = ("encoders", "override", i, "index")
        if own.index in seen:
            yield text.fault(key, own.index, "was overridden before; put all of it into one table")
        elif own.index >= t.encoders.count and own.external:
            reason = f"encoders.count is {t.encoders.count}: the last one is encoder-{t.encoders.count - 1}"
            yield text.fault(key, own.index, reason)
        seen.add(own.index)


def _devices(t: Topology, text: Text) -> Iterator[str]:
    if t.devices.kind == "none":
        return
    if not t.pd.devices and not t.pd.external:
        yield text.fault(("pd", "devices"), ABSENT, "is required with devices.kind other than none")
    e = t.encoders
    lacking = [
        i
        for i in range(e.count)
        if i >= len(e.devices) and e.overridden(i).device is None and not e.overridden(i).external
    ]
    if lacking:
        reason = f"{e.count} encoders need {e.count} devices"
        yield text.fault(("encoders", "devices"), e.devices, reason)
    replaced = {o.index for o in e.override if o.device is not None}
    held: list[tuple[Key, object, int]] = [(("pd", "devices"), t.pd.devices, d) for d in t.pd.devices]
    held += [(("encoders", "devices"), e.devices, d) for i, d in enumerate(e.devices) if i not in replaced]
    held += [
        (("encoders", "override", i, "device"), o.device, o.device)
        for i, o in enumerate(e.override)
        if o.device is not None
    ]
    owner: dict[int, str] = {}
    for key, value, device in held:
        if device in owner:
            reason = f"device {device} is in {owner[device]} too; a device serves one process"
            yield text.fault(key, value, reason)
        owner.setdefault(device, str(key[0]))


def _ports(t: Topology, text: Text) -> Iterator[str]:
    e = t.encoders
    last = e.port + e.count - 1
    if last > 65535:
        yield text.fault(("encoders", "port"), e.port, f"{e.count} encoders need ports up to {last}")
        return
    taken: dict[int, str] = {}
    roles: list[tuple[Key, int]] = [(("proxy", "port"), t.proxy.port)]
    roles += [] if t.pd.external else [(("pd", "port"), t.pd.port)]
    bound = connectors.listens(t, Role.PD) and not t.pd.external
    roles += [(("connector", "port"), t.connector.port)] if bound else []
    for key, port in roles:
        name = ".".join(map(str, key))
        if port in taken:
            yield text.fault(key, port, f"is {taken[port]} too; give each its own")
        taken.setdefault(port, name)
    moved = {o.index for o in e.override if o.port is not None or o.external}
    for key, port in roles:
        if e.port <= port <= last and port - e.port not in moved:
            reason = f"lies among the encoders' ports {e.port}-{last}; give each its own"
            yield text.fault(key, port, reason)
    for i, own in enumerate(e.override):
        if own.port is None or own.external:
            continue
        plain = e.port <= own.port <= last and own.port - e.port not in moved
        other = f"encoder-{own.port - e.port}'s" if plain else taken.get(own.port)
        if other:
            reason = f"is {other} too; give each its own"
            yield text.fault(("encoders", "override", i, "port"), own.port, reason)
        taken.setdefault(own.port, f"encoder-{own.index}'s")


def _arguments(t: Topology, text: Text) -> Iterator[str]:
    """Flags that other keys are for: given twice they would disagree one day, or be seen by everybody."""
    ours = {
        "--port": "set its port here instead",
        "--ec-transfer-config": "it is made from [connector]",
        "--api-key": "a command line is seen by everybody on the host: use model.api_key_file, or "
        "VLLM_API_KEY in [env] or in the environment",
    }
    if t.model.max_pixels is not None:
        ours["--mm-processor-kwargs"] = "it is made from model.max_pixels, the same for PD and encoders"
    if t.model.served_name:
        ours["--served-model-name"] = "it is made from model.served_name"
    if t.launcher.profile == "safe":
        ours["--host"] = "set its host here instead"
    lists: list[tuple[Key, list[str]]] = [
        (("pd", "args"), t.pd.args),
        (("encoders", "args"), t.encoders.args),
        *((("encoders", "override", i, "args"), o.args) for i, o in enumerate(t.encoders.override)),
    ]
    for key, args in lists:
        for word in args:
            flag = word.partition("=")[0].replace("_", "-")
            if flag in ours:
                yield text.fault(key, flag, ours[flag])


def _connector(t: Topology, text: Text) -> Iterator[str]:
    c = t.connector
    if c.kind not in connectors.KEYS and not c.module_path:
        known = ", ".join(connectors.KEYS)
        reason = f"is not known here ({known}); another one needs connector.module_path"
        yield text.fault(("connector", "kind"), c.kind, reason)
    tables: list[tuple[Key, Mapping[str, Any]]] = [
        (("connector", "extra"), c.extra),
        (("connector", "pd_extra"), c.pd_extra),
        (("connector", "encoder_extra"), c.encoder_extra),
        *(
            (("encoders", "override", i, "connector_extra"), o.connector_extra)
            for i, o in enumerate(t.encoders.override)
        ),
    ]
    for key, table in tables:
        for name in connectors.unknown_keys(c.kind, c.module_path, dict(table)):
            hint = strict.nearest(name, sorted(connectors.KEYS[c.kind]))
            reason = f"{c.kind} would ignore it; {hint}"
            yield text.fault((*key, name), table[name], reason)
    if c.shared_storage_path and "shared_storage_path" not in connectors.KEYS.get(c.kind, {}):
        key = ("connector", "shared_storage_path")
        yield text.fault(key, c.shared_storage_path, f"{c.kind} has none; it is for ECExampleConnector")


def _proxy(t: Topology, text: Text) -> Iterator[str]:
    known = strict.fields(Settings, hidden=LAUNCHED)
    sound = True
    for name, value in t.proxy.settings.items():
        key = ("proxy", "settings", name)
        problem = ""
        if name in LAUNCHED:
            problem = "follows from other keys"
        elif name in SECRET_FIELDS:
            problem = "is a secret: use proxy.api_key_file, model.api_key_file or an ECCON_PROXY_ variable"
        elif name not in known:
            problem = f"unknown key; {strict.nearest(name, known)}"
        else:
            try:
                msgspec.convert(value, known[name], strict=False)
            except msgspec.ValidationError as e:
                problem = strict.reason(str(e), known[name])
        if problem:
            sound = False
            shown = ABSENT if name in SECRET_FIELDS else value
            yield text.fault(key, shown, problem)
    if sound:
        yield from _proxy_as_a_whole(t, text)


def _proxy_as_a_whole(t: Topology, text: Text) -> Iterator[str]:
    """What eccon-proxy itself would refuse to start with."""
    pd = f"http://127.0.0.1:{t.pd.port}"
    given = {
        "decode_servers_urls": (pd,),
        "connector": t.connector.kind,
        "admin": "unix:/run/admin.sock",
        "port": t.proxy.port,
    }
    # The proxy runs in the configuration's directory, whoever asks from wherever.
    files = {k: str(t.directory / str(v)) for k, v in t.proxy.settings.items() if k in FILE_FIELDS and v}
    try:
        msgspec.convert(given | t.proxy.settings | files, Settings, strict=False)
    except (msgspec.ValidationError, ValueError) as e:
        for name, value in t.proxy.settings.items():
            if f"--{name.replace('_', '-')} " in f"{e} ":
                yield text.fault(("proxy", "settings", name), value, str(e))
                return
        yield text.fault(("proxy", "settings"), ABSENT, str(e))


def _versions(t: Topology, text: Text) -> Iterator[str]:
    """PD and encoders must speak the same wire and compute the same hashes."""
    seen: dict[str, tuple[str, str]] = {}
    commands: dict[str, dict[str, str]] = {}
    for name, command in versions.launchers(t).items():
        if command not in commands:
            commands[command] = {
                p: v
                for p in ("vllm-rbln", "vllm")
                if (v := versions.installed(command, p, t.directory)) is not None
            }
        for package, version in commands[command].items():
            other, its = seen.setdefault(package, (name, version))
            if its != version:
                reason = f"runs {package} {version}, {other} runs {its}; they must be the same"
                yield text.fault(_launcher_key(t, name), command, f"{name} {reason}")
                return


def _launcher_key(t: Topology, name: str) -> Key:
    if name == "pd":
        return ("pd", "vllm")
    index = int(name.rpartition("-")[2])
    for i, own in enumerate(t.encoders.override):
        if own.index == index and own.vllm:
            return ("encoders", "override", i, "vllm")
    return ("encoders", "vllm")

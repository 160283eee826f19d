"""The commands of launch scripts as an `eccon.toml`: what they agree on, what one differs in, what cannot be
carried over."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

import msgspec

from eccon.scripts.lexer import ScriptError
from eccon.scripts.reader import Command

__all__ = ["Found", "Serve", "compare", "serve", "show", "toml"]

DEVICE_VARIABLES = ("RBLN_VISIBLE_DEVICES", "RBLN_DEVICES", "CUDA_VISIBLE_DEVICES")
GUIDE_TTL = {"pull_host", "pull_port", "llm_host", "llm_pull_port"}
TAKES_VALUE_NOT = frozenset({"--trust-remote-code", "--enforce-eager", "--disable-log-requests"})


class Found(msgspec.Struct, frozen=True):
    """The text of an `eccon.toml`, and what an operator should know of how it came about."""

    text: str
    notes: tuple[str, ...]


class Serve(msgspec.Struct, kw_only=True):
    """One `vllm serve`."""

    where: str
    vllm: str
    model: str
    port: int = 8000
    host: str = ""
    served_name: str = ""
    max_pixels: int | None = None
    transfer: dict[str, Any]
    devices: list[int]
    cuda: bool
    env: dict[str, str]
    args: list[str]

    @property
    def is_pd(self) -> bool:
        return str(self.transfer.get("ec_role")) == "ec_consumer"

    @property
    def extra(self) -> dict[str, Any]:
        found = self.transfer.get("ec_connector_extra_config", {})
        return dict(found) if isinstance(found, dict) else {}


def toml(commands: Iterable[Command], *, name: str) -> Found:
    """A configuration that starts the same.

    Raises:
        ScriptError: there is no PD or no encoder among them, or they cannot belong to one cluster.
    """
    commands = list(commands)
    notes: list[str] = []
    serves = _once([s for c in commands if (s := _command(c, notes)) is not None], notes)
    proxies = [flags for c in commands if (flags := _proxy(c)) is not None]
    pds, encoders = [s for s in serves if s.is_pd], [s for s in serves if not s.is_pd]
    if not pds or not encoders:
        missing = "the PD (ec_consumer)" if not pds else "an encoder (ec_producer)"
        msg = f"no `vllm serve` of {missing} is started by what was read"
        raise ScriptError(msg)
    if len(pds) > 1:
        msg = f"{len(pds)} PDs are started ({', '.join(p.where for p in pds)}); a cluster has one"
        raise ScriptError(msg)
    pd = pds[0]
    compare(pd, encoders, notes)
    if not proxies:
        notes.append("no proxy was found: eccon-proxy gets the guide's port 19000")
    text = "\n".join(_lines(name, pd, encoders, proxies[0] if proxies else {}, notes))
    return Found(text + "\n", tuple(notes))


def _once(serves: list[Serve], notes: list[str]) -> list[Serve]:
    """Without those that are there again: a guide shows a command, and then a script with the same one."""
    kept: dict[tuple[str, int], Serve] = {}
    for s in serves:
        first = kept.setdefault((s.host, s.port), s)
        if first is s:
            continue
        if msgspec.structs.replace(s, where=first.where) != first:
            msg = f"{first.where} and {s.where} start two different servers on port {s.port}"
            raise ScriptError(msg)
        notes.append(f"{s.where}: port {s.port} again, the same as {first.where}: it counts once")
    return list(kept.values())


def _command(command: Command, notes: list[str]) -> Serve | None:
    return serve(command.argv, command.env, f"{command.path.name}:{command.line}", notes)


def serve(argv: Sequence[str], env: Mapping[str, str], where: str, notes: list[str]) -> Serve | None:
    """What this command says, if it is a `vllm serve` with a side of the EC connector.

    Raises:
        ScriptError: a value in it is not what vLLM takes; it begins with `where`.
    """
    words = list(argv)
    env = dict(env)
    start = next((i for i in range(len(words) - 1) if _is_vllm(words[i]) and words[i + 1] == "serve"), None)
    module = "vllm.entrypoints.openai.api_server"
    if start is not None:
        vllm, rest = words[start], words[start + 2 :]
    elif module in words:
        start = words.index(module)
        vllm, rest = "vllm", words[start + 1 :]
        notes.append(f"{where}: `python -m {module}` becomes `vllm serve`; set launcher.vllm to its command")
    else:
        return None
    for word in words[:start]:
        key, eq, value = word.partition("=")
        if eq and key.isidentifier():
            env[key] = value
        elif word in {"taskset", "numactl"}:
            notes.append(f"{where}: {word} is not carried over")
    flags, positional = _flags(rest)
    transfer = _json(flags.pop("--ec-transfer-config", "{}"), where, "--ec-transfer-config")
    if not transfer.get("ec_role"):
        return None
    processor = _json(flags.pop("--mm-processor-kwargs", "{}"), where, "--mm-processor-kwargs")
    pixels = processor.pop("max_pixels", None)
    if processor:
        notes.append(
            f"{where}: --mm-processor-kwargs has more than max_pixels: {', '.join(processor)} are lost"
        )
    if flags.pop("--api-key", "") or env.pop("VLLM_API_KEY", ""):
        notes.append(f"{where}: the API key is not carried over: put it into a file, model.api_key_file")
    variable = next((v for v in DEVICE_VARIABLES if v in env), "")
    listed = env.get(variable, "")
    for v in DEVICE_VARIABLES:
        env.pop(v, None)
    return Serve(
        where=where,
        vllm=vllm,
        model=flags.pop("--model", positional[0] if positional else ""),
        port=_port(flags.pop("--port", "8000"), f"{where}: --port"),
        host=flags.pop("--host", ""),
        served_name=flags.pop("--served-model-name", ""),
        max_pixels=pixels if isinstance(pixels, int) else None,
        transfer=transfer,
        devices=[int(d) for d in listed.split(",") if d.strip().isdigit()],
        cuda=variable.startswith("CUDA"),
        env=env,
        args=[word for flag, value in flags.items() for word in ((flag, value) if value != "" else (flag,))],
    )


def _is_vllm(word: str) -> bool:
    return PurePath(word).name in ("vllm", "eccon.sim")


def _flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Flags with their values ("" for none), and what stands alone before the first of them."""
    flags: dict[str, str] = {}
    positional: list[str] = []
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not word.startswith("-"):
            positional.append(word)
            continue
        flag, eq, value = word.partition("=")
        if not eq and flag not in TAKES_VALUE_NOT and i < len(words) and not words[i].startswith("--"):
            value = words[i]
            i += 1
        flags[flag.replace("_", "-")] = value
    return flags, positional


def _json(text: str, where: str, flag: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as e:
        msg = f"{where}: {flag} is not JSON: {e}"
        raise ScriptError(msg) from e
    if not isinstance(found, dict):
        msg = f"{where}: {flag} is not a JSON object"
        raise ScriptError(msg)
    return found


def _proxy(command: Command) -> dict[str, str] | None:
    if not any(w.partition("=")[0] == "--decode-servers-urls" for w in command.argv):
        return None
    return _flags(command.argv)[0]


def compare(pd: Serve, encoders: Sequence[Serve], notes: list[str]) -> None:
    """What must be the same on both sides; a difference is what breaks silently."""
    for what in ("max_pixels", "model"):
        values = {getattr(s, what): s.where for s in reversed((pd, *encoders))}
        if len(values) > 1:
            shown = ", ".join(f"{value} ({where})" for value, where in reversed(values.items()))
            notes.append(f"{what} differs: {shown}; the PD's is taken for all, they must be the same")
    for key, other in (("pull_port", "llm_pull_port"),):
        listens = pd.extra.get(key)
        wrong = [e.where for e in encoders if e.extra.get(other) != listens]
        if wrong:
            notes.append(f"{other} of {wrong[0]} is not the PD's {key} {listens}; the PD's is taken for all")


def _common(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all have alike."""
    return {k: v for k, v in rows[0].items() if all(k in r and r[k] == v for r in rows)}


def _lines(
    name: str, pd: Serve, encoders: list[Serve], proxy: dict[str, str], notes: list[str]
) -> Iterator[str]:
    everyone = [pd, *encoders]
    connector = pd.extra
    kind = str(pd.transfer.get("ec_connector", ""))
    port = _port(connector.get("pull_port", pd.transfer.get("ec_port", 16100)), f"{pd.where}: pull_port")
    hosts = Counter(str(e.extra.get("llm_host", "127.0.0.1")) for e in encoders)
    shared_env = _common([s.env for s in everyone])
    vllms = Counter(s.vllm for s in everyone)
    yield from ("# Read from launch scripts by `eccon init --from-scripts`.", f"name = {show(name)}", "")
    yield from ("[model]", f"path = {show(pd.model)}")
    if pd.max_pixels is None:
        notes.append("no max_pixels is set: large images may be more than the compiled model takes")
    yield f"max_pixels = {pd.max_pixels}" if pd.max_pixels is not None else "# max_pixels = 802816"
    if pd.served_name:
        yield f"served_name = {show(pd.served_name)}"
    yield from ("", "[launcher]", f"vllm = {show(vllms.most_common(1)[0][0])}")
    yield from ('# profile = "guide"             # exactly the scripts\' flags, nothing more', "")
    yield from ("[connector]", f"kind = {show(kind)}")
    if module := pd.transfer.get("ec_connector_module_path"):
        yield f"module_path = {show(module)}"
    yield from (f"host = {show(hosts.most_common(1)[0][0])}", f"port = {port}")
    pd_extra = {k: v for k, v in connector.items() if k not in GUIDE_TTL}
    encoder_extras = [{k: v for k, v in e.extra.items() if k not in GUIDE_TTL} for e in encoders]
    if pd_extra:
        yield f"pd_extra = {show(pd_extra)}"
    if encoder_extra := _common(encoder_extras):
        yield f"encoder_extra = {show(encoder_extra)}"
    kinds = "none" if not any(s.devices for s in everyone) else "cuda" if pd.cuda else "rbln"
    yield from ("", "[devices]", f"kind = {show(kinds)}", "")
    yield from ("[pd]", *_host(pd), f"port = {pd.port}", f"devices = {pd.devices}", *_rest(pd, shared_env))
    yield from ("", *_encoders(encoders, shared_env, encoder_extra, notes))
    yield from ("", *_proxy_lines(proxy, pd, encoders, notes))
    if shared_env:
        yield from ("", "[env]", *(f"{show(k)} = {show(v)}" for k, v in shared_env.items()))


def _host(s: Serve) -> list[str]:
    return [f"host = {show(s.host)}"] if s.host else []


def _rest(s: Serve, shared: dict[str, Any]) -> list[str]:
    own = {k: v for k, v in s.env.items() if k not in shared}
    return ([f"args = {show(s.args)}"] if s.args else []) + ([f"env = {show(own)}"] if own else [])


def _encoders(
    encoders: list[Serve], shared: dict[str, Any], extra: dict[str, Any], notes: list[str]
) -> Iterator[str]:
    ordered = sorted(encoders, key=lambda e: e.port)
    base = ordered[0].port
    args = ordered[0].args if all(e.args == ordered[0].args for e in ordered) else []
    env = _common([{k: v for k, v in e.env.items() if k not in shared} for e in ordered])
    yield from ("[encoders]", f"count = {len(ordered)}")
    hosts = {e.host for e in ordered}
    yield from _host(ordered[0]) if len(hosts) == 1 else ()
    yield from (f"port = {base}", f"devices = {[e.devices[0] for e in ordered if e.devices]}")
    yield from ([f"args = {show(args)}"] if args else []) + ([f"env = {show(env)}"] if env else [])
    for i, e in enumerate(ordered):
        if len(e.devices) > 1:
            notes.append(f"{e.where}: an encoder has one device; {e.devices[1:]} are not carried over")
        rows = []
        if e.port != base + i:
            rows.append(f"port = {e.port}")
        if len(hosts) > 1 and e.host:
            rows.append(f"host = {show(e.host)}")
        if e.args != args:
            rows.append(f"args = {show(e.args)}")
        if own := {k: v for k, v in e.env.items() if k not in env and k not in shared}:
            rows.append(f"env = {show(own)}")
        if own := {k: v for k, v in e.extra.items() if k not in GUIDE_TTL and k not in extra}:
            rows.append(f"connector_extra = {show(own)}")
        if rows:
            yield from ("", "[[encoders.override]]", f"index = {i}", *rows)


def _proxy_lines(flags: dict[str, str], pd: Serve, encoders: list[Serve], notes: list[str]) -> Iterator[str]:
    yield from ("[proxy]", f"host = {show(flags.get('--host', '0.0.0.0'))}")
    yield f"port = {_port(flags.get('--port', '19000'), 'the proxy: --port')}"
    if not flags:
        return
    ports = {_port_of(u) for u in flags.get("--encode-servers-urls", "").split(",") if u.strip()}
    if lost := sorted({e.port for e in encoders} ^ {p for p in ports if p}):
        notes.append(
            f"the proxy's encoders and those started differ in ports {lost}; those started are taken"
        )
    if _port_of(flags.get("--decode-servers-urls", "")) != pd.port:
        notes.append(f"the proxy's PD is not on the PD's port {pd.port}; the PD's is taken")


def _port(value: object, what: str) -> int:
    """A number that a port can be. Raises ScriptError: `what` it is that is none."""
    text = str(value)
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        msg = f"{what} is {text!r}: no port; what it is made of may have to be known first, as a variable"
        raise ScriptError(msg)
    return int(text)


def _port_of(url: str) -> int | None:
    try:
        return urlsplit(url.strip()).port
    except ValueError:
        return None


def show(value: Any) -> str:
    """As TOML, which writes strings, numbers, booleans and arrays as JSON does."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{show(str(k))} = {show(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    return json.dumps(value, ensure_ascii=False)

"""Flags, environment (`ECCON_PROXY_*`) and file → settings → the running proxy.

A flag beats its variable, a variable the file. Secrets are best given by variable or file: a command
line is seen by everybody on the host.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from eccon_proxy import __version__
from eccon_proxy.memberfile import listed
from eccon_proxy.settings import Settings, SettingsError, from_mapping, groups, keys, masked, normal_url
from eccon_proxy.tls import client_context, server_context

__all__ = ["main", "settings_from"]

PREFIX = "ECCON_PROXY"
_URLS = ("encode_servers_urls", "decode_servers_urls")
_COMMAS = (*_URLS, "encode_kinds", "cors_origins")
_REPEATED = ("groups", "api_keys")
_FIELDS = {f.name: f for f in msgspec.structs.fields(Settings)}
_HELP = {
    "host": "Address to listen on.",
    "port": "Port to listen on.",
    "encode_servers_urls": "Encoder URLs, separated by commas; more may join by the admin API.",
    "decode_servers_urls": "PD URLs, separated by commas.",
    "groups": "Which encoders push to which PD: PD_URL=ENC_URL,ENC_URL. Needed with several PDs.",
    "admin": "Where the admin API listens: unix:PATH or HOST:PORT.",
    "admin_key": "Key of the admin API; needed when it listens beyond loopback.",
    "encode_kinds": "Kinds of media that are encoded, separated by commas; others are refused.",
    "identity": "How items are named to encoder and PD.",
    "guard": "Whether the EC connector is guarded; auto: as the encoders' answers show.",
    "unsafe_identity": "Allow --identity content or off with a connector that cannot bear it.",
    "connector": "The EC connector of PD and encoders.",
    "policy": "How an encoder is chosen.",
    "encoder_concurrency": "Items at one encoder at a time.",
    "encode_wait": "Longest wait of an item for a free encoder, seconds.",
    "encode_attempts": "Encoders that an item is tried at.",
    "hedge": "Send an item to an idle encoder too when it takes this many times its encoder's p95; 0: never.",
    "probe_interval": "Seconds between two probes of an encoder.",
    "probe_timeout": "Longest answer of an encoder's /health, seconds.",
    "probe_failures": "Probes missed until an encoder is down.",
    "eject_after": "Encodes that fail in a row until an encoder is ejected.",
    "eject_seconds": "First time out; it doubles up to four times this.",
    "pd_probe_interval": "Seconds between two probes of the PD.",
    "pd_probe_timeout": "Longest answer of the PD's /health, seconds.",
    "stall_after": "Silence of all answers after which the PD is asked for one token, seconds.",
    "poison_deaths": "Deaths of the PD with a request in flight until it is refused.",
    "poison_seconds": "How long such a death counts, seconds.",
    "max_inflight": "Requests under way.",
    "queue": "Requests that may wait for one of these.",
    "queue_timeout": "Longest wait for room, seconds.",
    "pd_items": "Items of all requests that the PD has not begun to answer: its max_concurrent_pulls.",
    "staged_items": "Items that one encoder holds for the PD; below its producer_cache_capacity.",
    "staged_age": "Age beyond which an item is encoded again; below producer_cache_ttl_s.",
    "connect_timeout": "Longest connect to a server behind, seconds.",
    "encode_timeout": "Longest encode of one item, seconds.",
    "first_byte_timeout": "Longest wait for the first byte of the PD's answer, seconds.",
    "stream_idle_timeout": "Longest silence within an answer, seconds.",
    "header_timeout": "Longest arrival of a client's header, seconds.",
    "body_timeout": "Longest arrival of a client's body, seconds.",
    "request_timeout": "Deadline of a whole request, seconds; 0: none.",
    "drain_delay": "Seconds between SIGTERM and the end of the listener.",
    "shutdown_grace": "Seconds that requests under way have after that.",
    "max_body": "Longest body, bytes.",
    "max_header": "Longest header, bytes.",
    "max_connections": "Connections of clients.",
    "cors_origins": "Origins that browsers may call from, separated by commas.",
    "inline_max_bytes": "Longest image that is downloaded, bytes.",
    "inline_timeout": "Longest download, seconds.",
    "inline_private": "Allow downloads from private and link-local addresses.",
    "ssl_certfile": "TLS certificate of the public port.",
    "ssl_keyfile": "Its key, when that is in a file of its own.",
    "ssl_keyfile_password": "Password of the key.",
    "ssl_ca_certs": "CA certificates that clients' certificates are checked with.",
    "ssl_cert_reqs": "Certificates of clients: 0 none, 1 optional, 2 required.",
    "ssl_ciphers": "OpenSSL's list of ciphers; empty: Python's.",
    "ssl_version": "Protocol, as the number of Python's ssl.PROTOCOL_*.",
    "upstream_ca": "CA certificates (file or directory) of https servers behind; empty: the system's.",
    "trace_bytes": "Memory for the last traces, bytes.",
    "otlp_endpoint": "OpenTelemetry collector that traces are sent to, by HTTP.",
    "log_format": "How the log is written.",
    "log_level": "What is logged.",
    "api_keys": "Key that clients must send; repeatable.",
    "upstream_api_key": "Key sent to PD and encoders when the client's own is not.",
    "encoders_file": "File of encoder URLs, one a line (several PDs: PD_URL=ENC_URL,…); SIGHUP: read again.",
    "inline_media": "Download remote images once and send data URLs to both sides.",
}
_NAMES = {"groups": "--group", "api_keys": "--api-key"}


def _option(name: str) -> Any:
    field = _FIELDS[name]
    default = field.default
    flag = _NAMES.get(name, "--" + name.replace("_", "-"))
    kwargs: dict[str, Any] = {"help": _HELP.get(name), "default": None}
    if name in _REPEATED:
        kwargs |= {"multiple": True, "default": ()}
    elif isinstance(default, bool):
        kwargs |= {"is_flag": True}
        flag = f"{flag}/--no-{flag[2:]}"
    elif name in _COMMAS or isinstance(default, str):
        kwargs |= {"type": str}
        choices = getattr(field.type, "__args__", None)
        if choices and all(isinstance(c, str) for c in choices):
            kwargs |= {"type": click.Choice(choices)}
    else:
        kwargs |= {"type": type(default)}
    if default not in ("", (), False):
        shown = ",".join(default) if isinstance(default, tuple) else default
        kwargs["help"] = f"{kwargs['help'] or ''} [default: {shown}]".strip()
    return click.option(flag, name, **kwargs)


def _options(command: Any) -> Any:
    for name in reversed(_FIELDS):
        command = _option(name)(command)
    return command


@click.command(context_settings={"auto_envvar_prefix": PREFIX, "max_content_width": 100})
@_options
@click.option("--config", type=click.Path(dir_okay=False), help="TOML file with any of these settings.")
@click.option("--check", is_flag=True, help="Check the settings, print them, and exit.")
@click.option("--api-key-file", type=click.Path(dir_okay=False), help="File with one client key a line.")
@click.option("--upstream-api-key-file", type=click.Path(dir_okay=False), help="File with the upstream key.")
@click.version_option(__version__)
def command(
    config: str | None,
    check: bool,
    api_key_file: str | None,
    upstream_api_key_file: str | None,
    **flags: Any,
) -> None:
    """Send each media item of a chat request to an encoder, then the request to the PD."""
    try:
        values = _file(config)
        values |= {k: v for k, v in flags.items() if v is not None and v != ()}
        if upstream_api_key_file:
            values["upstream_api_key"] = keys(upstream_api_key_file)[0]
        settings = settings_from(values, keys(api_key_file) if api_key_file else ())
        if check:
            if settings.otlp_endpoint:
                from eccon_proxy.otlp import Exporter  # noqa: PLC0415  the SDK takes half a second

                Exporter(settings.otlp_endpoint).close()
            server_context(settings)
            client_context(settings.upstream_ca)
            for group in groups(settings):
                click.echo(f"{group.pd} <- {', '.join(group.encoders) or 'no encoders yet'}")
            for name, value in masked(settings).items():
                click.echo(f"{name} = {msgspec.json.encode(value).decode()}")
            return
        from eccon_proxy.server import run  # noqa: PLC0415  --help and --check need no server

        sys.exit(run(settings))
    except SettingsError as error:
        click.echo(f"eccon-proxy: {error}", err=True)
        sys.exit(2)


def settings_from(values: dict[str, Any], more_keys: Sequence[str] = ()) -> Settings:
    """Settings from flags and file, with lists taken apart and URLs in normal form."""
    found = dict(values)
    for name in (*_COMMAS, *_REPEATED):
        if name in found:
            found[name] = _listed(name, found[name])
    # A variable holds several keys, separated by commas; a flag is given several times.
    given = found.get("api_keys", ())
    if not all(_split(key) for key in given):
        raise SettingsError("--api-key: an empty key would let everybody in, or nobody")
    found["api_keys"] = [k for key in given for k in _split(key)] + list(more_keys)
    for name in _URLS:
        found[name] = [normal_url(u) for u in found.get(name, ())]
    if not isinstance(found.get("encoders_file", ""), str):
        raise SettingsError("encoders_file: the path of a file is needed")
    if found.get("encoders_file") and found["decode_servers_urls"]:
        members = listed(found["encoders_file"], found["decode_servers_urls"])
        found["encode_servers_urls"] += members
        if len(found["decode_servers_urls"]) > 1:
            found["groups"] = _grouped(found, members)
    return from_mapping(found)


def _listed(name: str, value: object) -> list[str]:
    """A setting that is a list, however it was written: a file may hold a list or one string."""
    if isinstance(value, str):
        return _split(value) if name in _COMMAS else [value]
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise SettingsError(f"{name}: a string or a list of strings is needed")
    return list(value)


def _split(text: str) -> list[str]:
    return [v.strip() for v in text.split(",") if v.strip()]


def _grouped(found: dict[str, Any], members: dict[str, str]) -> list[str]:
    """The groups of flags, with the members of the file in theirs."""
    groups = list(found.get("groups", ()))
    for url, pd in members.items():
        for i, text in enumerate(groups):
            if text.partition("=")[0].strip() and normal_url(text.partition("=")[0]) == pd:
                groups[i] = f"{text},{url}"
                break
        else:
            groups.append(f"{pd}={url}")
    # A PD of which the file names nobody yet is a group too.
    named = {normal_url(text.partition("=")[0]) for text in groups}
    return groups + [f"{pd}=" for pd in found["decode_servers_urls"] if pd not in named]


def _file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415
    else:
        import tomli as tomllib  # noqa: PLC0415
    try:
        values: dict[str, Any] = tomllib.loads(Path(path).read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"--config {path}: {error}") from None
    values = {_key(k): v for k, v in values.items()}
    if unknown := sorted(values.keys() - _FIELDS.keys()):
        raise SettingsError(f"--config {path}: unknown setting {unknown[0]!r}")
    return values


def _key(name: str) -> str:
    name = name.replace("-", "_")
    return {"group": "groups", "api_key": "api_keys"}.get(name, name)


def main() -> None:
    """Entry point."""
    command()

"""Every setting of the proxy in one frozen struct, checked once, before anything is started."""

import contextlib
import ipaddress
import math
import socket
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

__all__ = [
    "FILE_FIELDS",
    "KINDS",
    "SECRET_FIELDS",
    "Group",
    "Settings",
    "SettingsError",
    "groups",
    "keys",
    "lines",
    "masked",
    "normal_url",
]

Kind = Literal[
    "image_url", "input_image", "image_embeds", "audio_url", "input_audio", "audio_embeds",
    "video_url", "video_embeds", "prompt_embeds",
]  # fmt: skip
KINDS: tuple[str, ...] = Kind.__args__  # type: ignore[attr-defined]
"""Media kinds of vLLM's chat API, by the `type` of their part."""

RBLN_CONNECTOR = "RblnECNixlConnector"
SECRET_FIELDS = frozenset({"api_keys", "upstream_api_key", "admin_key", "ssl_keyfile_password"})
FILE_FIELDS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "encoders_file", "upstream_ca")
"""Settings that are paths; relative ones start at the proxy's working directory."""

_COUNTS = (
    "encoder_concurrency", "encode_attempts", "probe_failures", "eject_after", "poison_deaths",
    "max_inflight", "pd_items", "staged_items", "max_body", "max_header", "max_connections",
    "inline_max_bytes",
)  # fmt: skip
_SECONDS = (
    "probe_interval", "probe_timeout", "pd_probe_interval", "pd_probe_timeout", "stall_after",
    "connect_timeout", "encode_timeout", "first_byte_timeout", "stream_idle_timeout", "header_timeout",
    "body_timeout", "staged_age", "eject_seconds", "poison_seconds", "inline_timeout",
)  # fmt: skip
_SECONDS_OR_NONE = (
    "encode_wait",
    "queue_timeout",
    "request_timeout",
    "drain_delay",
    "shutdown_grace",
    "hedge",
)


class SettingsError(ValueError):
    """A setting that cannot work; the message names it and says why."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times are seconds, sizes bytes. The flag of each field is its name with dashes."""

    host: str = "0.0.0.0"
    port: int = 19000
    encode_servers_urls: tuple[str, ...] = ()
    decode_servers_urls: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    """`PD_URL=ENC_URL,ENC_URL`: which encoders push to which PD; needed with several PDs."""
    admin: str = ""
    """`unix:PATH` or `HOST:PORT`; empty: a socket in the state directory."""
    admin_key: str = ""

    # Identity and what is encoded
    encode_kinds: tuple[str, ...] = (
        "image_url", "input_image", "audio_url", "input_audio",
    )  # fmt: skip
    identity: Literal["attempt", "content", "off"] = "attempt"
    """"content": an image that comes again is neither encoded nor computed anew where it is still held. With
    RblnECNixlConnector only behind the guard: `guard` "on" refuses encoders that do not prove delivery."""
    unsafe_identity: bool = False
    guard: Literal["auto", "on", "off"] = "auto"
    """Whether the EC connector is guarded, so that encoders prove delivery and the PD fails single requests;
    "auto": as the encoders' answers show."""
    connector: str = RBLN_CONNECTOR

    # Choice of encoder
    policy: Literal["round_robin", "least_inflight", "least_work", "affinity"] = "round_robin"
    encoder_concurrency: int = 16
    """Items at one encoder at a time."""
    encode_wait: float = 30.0
    """Longest wait of an item for a free encoder."""
    encode_attempts: int = 3
    hedge: float = 0.0
    """An item slower than its encoder's p95 times this is sent to an idle encoder too; 0: never."""

    # Failure of encoders
    probe_interval: float = 2.0
    probe_timeout: float = 3.0
    probe_failures: int = 3
    """With the time limit: a vLLM that is busy for 8 s is not taken for dead, one that hangs 12 s is."""
    eject_after: int = 3
    eject_seconds: float = 5.0
    """First time out of the pool; doubles up to four times this."""

    # PD
    pd_probe_interval: float = 1.0
    pd_probe_timeout: float = 6.0
    stall_after: float = 10.0
    poison_deaths: int = 2
    poison_seconds: float = 3600.0
    """How long a death of the PD is held against the requests that were there."""

    # Admission
    max_inflight: int = 4096
    queue: int = 1024
    queue_timeout: float = 30.0
    pd_items: int = 32
    """Items of all requests handed to one PD and not yet answered; the connector's `max_concurrent_pulls`."""
    staged_items: int = 96
    """Items at one encoder that the PD has not consumed; below the connector's capacity of 128."""
    staged_age: float = 45.0
    """Age beyond which an item is encoded again; below the connector's 60 s."""

    # Time limits
    connect_timeout: float = 3.0
    encode_timeout: float = 60.0
    first_byte_timeout: float = 600.0
    stream_idle_timeout: float = 300.0
    header_timeout: float = 15.0
    body_timeout: float = 60.0
    request_timeout: float = 0.0
    """Deadline of a whole request, 0: none. A client's `x-request-timeout` header may shorten it."""
    drain_delay: float = 2.0
    shutdown_grace: float = 30.0

    # Input
    max_body: int = 128 * 1024 * 1024
    max_header: int = 64 * 1024
    max_connections: int = 16384
    api_keys: tuple[str, ...] = ()
    upstream_api_key: str = ""
    cors_origins: tuple[str, ...] = ()
    inline_media: bool = False
    inline_max_bytes: int = 32 * 1024 * 1024
    inline_timeout: float = 20.0
    inline_private: bool = False
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    ssl_keyfile_password: str = ""
    ssl_ca_certs: str = ""
    """Who signs the certificates of clients."""
    ssl_cert_reqs: int = 0
    """0: clients show none, 1: they may, 2: they must."""
    ssl_ciphers: str = ""
    ssl_version: int = int(ssl.PROTOCOL_TLS_SERVER)
    upstream_ca: str = ""
    """Who signs the certificates of `https` servers behind; empty: whom the system trusts."""

    # What it tells
    trace_bytes: int = 16 * 1024 * 1024
    otlp_endpoint: str = ""
    log_format: Literal["json", "text"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    encoders_file: str = ""
    """A file of encoder URLs, one a line, read again at SIGHUP; see `memberfile`."""

    def __post_init__(self) -> None:
        _check(self)


class Group(msgspec.Struct, frozen=True):
    """One PD and the encoders that push to it."""

    pd: str
    encoders: tuple[str, ...]


def normal_url(text: str) -> str:
    """`scheme://host:port[/path]`, lower case, default port written out, `localhost` as 127.0.0.1."""
    text = text.strip()
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError as error:
        raise SettingsError(f"{text!r} is not a URL: {error}") from None
    if url.scheme not in {"http", "https"} or not url.hostname:
        raise SettingsError(f"{text!r} is not an http URL, as http://127.0.0.1:19101")
    if url.username is not None or url.query or url.fragment:
        raise SettingsError(f"{text!r}: a server's URL has no user, query or fragment")
    if not all(" " < c <= "~" for c in text):
        raise SettingsError(f"{text!r}: a URL is written in ASCII without spaces")
    host = _normal_host(url.hostname.lower().rstrip("."))
    if not host.strip("[]").replace("-", "").replace(".", "").replace("_", "").replace(":", "").isalnum():
        raise SettingsError(f"{text!r}: {host!r} is not a host name")
    if port == 0:
        raise SettingsError(f"{text!r}: port 0 is not a server's port")
    path = url.path.rstrip("/")
    return f"{url.scheme}://{host}:{port or (443 if url.scheme == 'https' else 80)}{path}"


def _normal_host(host: str) -> str:
    """One spelling of an address, in brackets when it is IPv6: a socket takes 127.1 and 2130706433 too."""
    if host == "localhost":
        return "127.0.0.1"
    if host[:1].isdigit():
        with contextlib.suppress(OSError):
            host = socket.inet_ntoa(socket.inet_aton(host))
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_unspecified:  # whoever connects there arrives at loopback
        return "[::1]" if address.version == 6 else "127.0.0.1"
    return f"[{address.compressed}]" if address.version == 6 else address.compressed


def groups(settings: Settings) -> tuple[Group, ...]:
    """Which encoders belong to which PD, in the order of the flags."""
    encoders = settings.encode_servers_urls
    pds = settings.decode_servers_urls
    if not settings.groups:
        if len(pds) > 1:
            raise SettingsError(
                "several --decode-servers-urls need a --group PD_URL=ENC_URL,ENC_URL for each: an encoder "
                "pushes what it encodes to exactly one PD, so the proxy must know which group of encoders "
                "feeds which PD"
            )
        return (Group(pds[0], encoders),)
    found: dict[str, tuple[str, ...]] = {}
    for text in settings.groups:
        pd_text, eq, list_text = text.partition("=")
        if not eq:
            raise SettingsError(f"--group {text!r} is not PD_URL=ENC_URL,ENC_URL")
        pd = normal_url(pd_text)
        if pd not in pds:
            raise SettingsError(f"--group {text!r}: {pd} is not among --decode-servers-urls")
        if pd in found:
            raise SettingsError(f"--group names {pd} twice")
        found[pd] = tuple(normal_url(e) for e in list_text.split(",") if e.strip())
    grouped = [e for members in found.values() for e in members]
    for name, bad in (
        ("in no --group", set(encoders) - set(grouped)),
        ("in a --group but not among --encode-servers-urls", set(grouped) - set(encoders)),
        ("in more than one --group", {e for e in grouped if grouped.count(e) > 1}),
    ):
        if bad:
            raise SettingsError(f"{', '.join(sorted(bad))} is {name}: an encoder pushes to exactly one PD")
    if missing := [pd for pd in pds if pd not in found]:
        raise SettingsError(f"{', '.join(missing)} has no --group")
    return tuple(Group(pd, found[pd]) for pd in pds)


def masked(settings: Settings) -> dict[str, object]:
    """The settings in force, with every secret replaced."""
    out: dict[str, object] = {}
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if name in SECRET_FIELDS and value:
            value = ["***"] * len(value) if isinstance(value, tuple) else "***"
        out[name] = value
    return out


def from_mapping(values: Mapping[str, object]) -> Settings:
    """Settings from plain values, with messages that name the setting."""
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(str(error)) from None


def lines(path: str) -> list[str]:
    """The lines of a small file, without comments and blanks."""
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None
    return [s for line in text.splitlines() if (s := line.partition("#")[0].strip())]


def keys(path: str) -> list[str]:
    """The keys of a file, one a line; a line that begins with `#` is a comment. There must be one."""
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None
    found = [s for line in text.splitlines() if (s := line.strip()) and not s.startswith("#")]
    if not found:
        raise SettingsError(f"{path}: holds no key")
    return found


def admin_address(settings: Settings) -> tuple[str, int] | None:
    """Host and port of the admin API; None when it is a unix socket."""
    text = settings.admin
    if not text or (text.startswith("unix:") and len(text) > len("unix:")):
        return None
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535 or host.startswith("unix"):
        raise SettingsError(f"--admin {text!r}: neither unix:PATH nor HOST:PORT")
    if host not in {"127.0.0.1", "localhost", "::1"} and not settings.admin_key:
        raise SettingsError(f"--admin {text!r}: other than loopback it needs --admin-key")
    return host, int(port)


def listens_at(host: str, port: int, url: str) -> bool:
    """Whether a socket bound to host and port answers under a normal URL."""
    parts = urlsplit(url)
    target = parts.hostname or ""
    if parts.port != port:
        return False
    everywhere = host in {"", "0.0.0.0", "::"}
    try:
        wanted = ipaddress.ip_address(target)
    except ValueError:
        return target == (socket.gethostname() if everywhere else host).lower()
    if not everywhere or wanted.is_loopback:
        return everywhere or _normal_host(host.lower()).strip("[]") == target
    # Every address of this host: those that a socket can be bound to.
    family = socket.AF_INET if wanted.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((target, 0))
    except OSError:
        return False
    return True


def _unique(name: str, urls: Iterable[str]) -> None:
    seen: set[str] = set()
    for url in urls:
        if normal_url(url) != url:
            raise SettingsError(f"{name}: {url!r} is not in normal form ({normal_url(url)})")
        if url in seen:
            raise SettingsError(f"{name} names {url} twice")
        seen.add(url)


def _check(s: Settings) -> None:
    if not 0 <= s.port < 65536:
        raise SettingsError(f"--port {s.port}: not between 0 and 65535")
    if not s.decode_servers_urls:
        raise SettingsError("--decode-servers-urls: at least one PD is needed")
    _unique("--encode-servers-urls", s.encode_servers_urls)
    _unique("--decode-servers-urls", s.decode_servers_urls)
    if both := set(s.encode_servers_urls) & set(s.decode_servers_urls):
        raise SettingsError(f"{', '.join(sorted(both))} is both encoder and PD")
    groups(s)
    admin_address(s)
    if bad := [k for k in s.encode_kinds if k not in KINDS]:
        raise SettingsError(f"--encode-kinds {bad[0]!r}: not one of {', '.join(KINDS)}")
    borne = s.identity == "attempt" or (s.identity == "content" and s.guard == "on")
    if not borne and s.connector == RBLN_CONNECTOR and not s.unsafe_identity:
        raise SettingsError(
            f"--identity {s.identity} with {s.connector} needs --unsafe-identity: an encoder that holds "
            "an item answers 200 and pushes nothing, and the PD exits 30 s later"
            + (" (guarded it bears content: --guard on)" if s.identity == "content" else "")
        )
    if s.policy == "affinity" and s.identity != "content":
        raise SettingsError("--policy affinity needs --identity content: else no encoder reuses an item")
    for name in _COUNTS:
        if getattr(s, name) < 1:
            raise SettingsError(f"--{name.replace('_', '-')} {getattr(s, name)}: at least 1")
    for name in _SECONDS:
        if not 0 < getattr(s, name) < math.inf:
            raise SettingsError(f"--{name.replace('_', '-')} {getattr(s, name)}: more than 0 seconds")
    for name in _SECONDS_OR_NONE:
        if not 0 <= getattr(s, name) < math.inf:
            raise SettingsError(f"--{name.replace('_', '-')} {getattr(s, name)}: 0 or more seconds")
    for name in ("queue", "trace_bytes"):
        if getattr(s, name) < 0:
            raise SettingsError(f"--{name.replace('_', '-')} {getattr(s, name)}: 0 or more")
    if not s.connector.strip():
        raise SettingsError("--connector: empty")
    for name in SECRET_FIELDS:
        secret = getattr(s, name)
        if any(not key.isprintable() for key in (secret if isinstance(secret, tuple) else (secret,))):
            raise SettingsError(f"{name}: a control character in a key")
    if not s.upstream_api_key.isascii():
        raise SettingsError("--upstream-api-key: a header takes ASCII only")
    for name in FILE_FIELDS:
        value = getattr(s, name)
        # An authority may be a directory.
        if value and not (Path(value).is_file() or (name == "upstream_ca" and Path(value).is_dir())):
            raise SettingsError(f"--{name.replace('_', '-')} {value!r}: no such file")
    if s.otlp_endpoint:
        url = urlsplit(s.otlp_endpoint)
        if url.scheme not in {"http", "https"} or not url.hostname:
            raise SettingsError(f"--otlp-endpoint {s.otlp_endpoint!r}: not a URL as http://127.0.0.1:4318")
    if not s.ssl_certfile and (s.ssl_keyfile or s.ssl_ca_certs or s.ssl_cert_reqs):
        raise SettingsError("the --ssl- flags need --ssl-certfile")
    if s.ssl_cert_reqs not in {0, 1, 2}:
        raise SettingsError(f"--ssl-cert-reqs {s.ssl_cert_reqs}: 0 (none), 1 (optional) or 2 (required)")
    if s.ssl_cert_reqs and not s.ssl_ca_certs:
        raise SettingsError("--ssl-cert-reqs needs --ssl-ca-certs: who signs the certificates of clients")

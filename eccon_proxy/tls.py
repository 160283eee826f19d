"""TLS on both sides: the public port's certificate, and whose certificates servers behind may show."""

import functools
import ssl
from pathlib import Path

from eccon_proxy.settings import Settings, SettingsError

__all__ = ["client_context", "server_context"]


def server_context(settings: Settings) -> ssl.SSLContext | None:
    """How the public port speaks TLS; None when it does not. Flags mean what they mean to uvicorn.

    Raises `SettingsError` for files that do not fit.
    """
    s = settings
    if not s.ssl_certfile:
        return None
    try:
        context = ssl.SSLContext(s.ssl_version)
        # Without a password OpenSSL would ask on the terminal, of whoever may sit there.
        context.load_cert_chain(s.ssl_certfile, s.ssl_keyfile or None, lambda: s.ssl_keyfile_password)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--ssl-certfile {s.ssl_certfile!r}: not usable with its key: {error}") from None
    try:
        if s.ssl_ca_certs:
            context.load_verify_locations(s.ssl_ca_certs)
        context.verify_mode = ssl.VerifyMode(s.ssl_cert_reqs)
        if s.ssl_ciphers:
            context.set_ciphers(s.ssl_ciphers)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--ssl-ca-certs, --ssl-cert-reqs or --ssl-ciphers: {error}") from None
    context.set_alpn_protocols(["http/1.1"])
    return context


@functools.lru_cache(maxsize=4)
def client_context(ca: str) -> ssl.SSLContext:
    """Whom to believe that it is an https server behind: those that `ca` vouches for, else the system's.

    `ca` is a PEM file or a directory of hashed ones. One context for all: reading the system's takes 20 ms.
    Raises `SettingsError`.
    """
    try:
        folder = Path(ca).is_dir()
        if not ca:
            return ssl.create_default_context()
        return ssl.create_default_context(cafile=None if folder else ca, capath=ca if folder else None)
    except OSError as error:
        raise SettingsError(f"--upstream-ca {ca!r}: {error}") from None

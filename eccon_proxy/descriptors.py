"""How many clients fit into the files that the process may have open.

A client is one descriptor, its request at the PD another, each item that is being encoded one more. Beyond
what fits, clients are told to come again: a process without descriptors can neither accept nor ask anyone.
"""

import msgspec

from eccon_proxy.settings import Settings

__all__ = ["fitted"]

OWN = 64
"""Listeners, log, event loop, probes, the admin API's clients."""
PER_PD = 8


def fitted(settings: Settings, limit: int) -> Settings:
    """The settings with no more connections and requests than fit into `limit` open files."""
    encoders = len(settings.encode_servers_urls) * (settings.encoder_concurrency + 2)
    # An eighth is for those that come beyond the cap, until they have read that they are.
    usable = limit - limit // 8 - OWN - PER_PD * len(settings.decode_servers_urls) - min(encoders, limit // 4)
    inflight = min(settings.max_inflight, max(8, usable * 2 // 5))
    connections = min(settings.max_connections, max(16, usable - inflight))
    return msgspec.structs.replace(settings, max_inflight=inflight, max_connections=connections)

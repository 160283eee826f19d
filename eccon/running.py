"""An `eccon.toml` for servers that run already: they are watched and used, and never signalled.

What eccon starts of its own is the proxy before them.
"""

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from eccon.discovery import Server
from eccon.launch.spec import loopback_for
from eccon.scripts.lexer import ScriptError
from eccon.scripts.topology import Found, Serve, compare, serve, show

__all__ = ["Group", "groups", "toml"]

PROXY_PORT = 19000
"""The guide's; the first free one from there on is taken."""


class Group(msgspec.Struct, frozen=True):
    """A PD that runs, and the encoders that push to it, by port."""

    pd: Serve
    encoders: tuple[Serve, ...]
    notes: tuple[str, ...]
    """What could not be understood of their command lines."""


def groups(servers: Sequence[Server]) -> list[Group]:
    """Those of the servers that have both sides of an EC connector, by the connector that they meet at."""
    found: list[tuple[Serve, list[str]]] = []
    for server in servers:
        notes: list[str] = []
        try:
            one = serve(server.argv, {}, f"pid {server.pid}", notes)
        except ScriptError:
            continue  # it would not run with these, so it is none of vLLM's
        # Whoever started it (a shim, `sudo`) may have the same words.
        if one is not None and all((one.host, one.port) != (e.host, e.port) for e, _ in found):
            one.model = _absolute(one, server.directory)
            found.append((one, notes))
    out = []
    for pd, notes in found:
        mine = [(e, more) for e, more in found if not e.is_pd and _meeting(e) == _meeting(pd)]
        if pd.is_pd and mine:
            encoders = sorted((e for e, _ in mine), key=lambda e: e.port)
            out.append(Group(pd, tuple(encoders), (*notes, *(n for _, more in mine for n in more))))
    return out


def toml(group: Group, *, name: str) -> Found:
    """The text; and what an operator should know of it."""
    notes = [*group.notes]
    compare(group.pd, group.encoders, notes)
    return Found("\n".join(_lines(group, name, _free_port(PROXY_PORT))) + "\n", tuple(notes))


def _absolute(one: Serve, directory: str) -> str:
    """The model where it lies; its name for clients stays what it was."""
    path = Path(directory, one.model)
    if not directory or not path.is_dir():
        return one.model
    one.served_name = one.served_name or one.model
    return str(path)


def _meeting(one: Serve) -> tuple[object, ...]:
    """What PD and encoders of one cluster have alike."""
    extra, transfer = one.extra, one.transfer
    pull = extra.get("pull_port") if one.is_pd else extra.get("llm_pull_port")
    return (
        transfer.get("ec_connector"),
        pull,
        extra.get("shared_storage_path"),
        transfer.get("ec_ip"),
        transfer.get("ec_port"),
    )


def _lines(group: Group, name: str, proxy: int) -> Iterator[str]:
    pd, encoders = group.pd, group.encoders
    yield "# Written for servers that run: eccon watches and uses them, and starts the proxy."
    yield "# They are never stopped from here, and their logs are where they were started."
    yield from (f"name = {show(name)}", "", "[model]", f"path = {show(pd.model)}")
    if pd.served_name:
        yield f"served_name = {show(pd.served_name)}"
    if pd.max_pixels is not None:
        yield f"max_pixels = {pd.max_pixels}"
    if not Path(pd.model).is_dir():
        yield "hub = true"
    yield from (
        "",
        "[launcher]",
        'profile = "guide"                # nothing but the servers\' own flags counts',
    )
    yield from (
        "",
        "[connector]",
        f"kind = {show(str(pd.transfer.get('ec_connector', '')))}",
        'guard = "off"',
    )
    if module := pd.transfer.get("ec_connector_module_path"):
        yield f"module_path = {show(module)}"
    port = pd.extra.get("pull_port", pd.transfer.get("ec_port"))
    if isinstance(port, int):
        yield f"port = {port}"
    for key, extra in (("pd_extra", pd.extra), ("encoder_extra", encoders[0].extra)):
        if limits := {k: v for k, v in extra.items() if not k.endswith(("_host", "_port"))}:
            yield f"{key} = {show(limits)}"
    yield from ("", "[devices]", 'kind = "none"                    # nothing is placed from here')
    yield from ("", "[pd]", "external = true", f"url = {show(_url(pd))}")
    yield from ("", "[encoders]", f"count = {len(encoders)}")
    for i, e in enumerate(encoders):
        yield from ("", "[[encoders.override]]", f"index = {i}", "external = true", f"url = {show(_url(e))}")
    yield from ("", "[proxy]", 'host = "127.0.0.1"', f"port = {proxy}")


def _url(one: Serve) -> str:
    host = loopback_for(one.host)
    scheme = "https" if "--ssl-certfile" in one.args else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{one.port}"


def _free_port(first: int) -> int:
    for port in range(first, first + 100):
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    return first

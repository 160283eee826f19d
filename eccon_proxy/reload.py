"""SIGHUP: the list of encoders is read again; who is new joins, who is gone is drained and leaves.

A file that cannot be read or holds nonsense changes nothing, and the log says so.
"""

from eccon_proxy.core import Core
from eccon_proxy.drain import Drains
from eccon_proxy.log import logger
from eccon_proxy.memberfile import listed
from eccon_proxy.settings import SettingsError

__all__ = ["reload"]


def reload(core: Core, drains: Drains) -> None:
    """Read the encoders' file again."""
    path = core.settings.encoders_file
    if not path:
        logger.warning("SIGHUP: no --encoders-file to read again")
        return
    present = {e.url: e for e in core.encoders.values()}
    pds = {pd.url: pd for pd in core.pds}
    try:
        wanted = listed(path, tuple(pds))
        for url, pd in wanted.items():
            if core.is_own(url):
                raise SettingsError(f"{path}: {url} is this proxy itself")
            if url in present and core.pd_of(present[url]).url != pd:
                raise SettingsError(
                    f"{path}: {url} pushes to {core.pd_of(present[url]).url}, not to {pd}: "
                    "let it leave first, and restart it for the other PD"
                )
    except SettingsError as error:
        logger.error("SIGHUP: nothing changed: %s", error)
        return
    for url, pd in wanted.items():
        if url not in present:
            core.join(core.free_id(), url, pds[pd])
        elif present[url].leaving:
            drains.resume(present[url])
    gone = core.from_file - wanted.keys()
    for url in gone & present.keys():
        drains.begin(present[url], now=False, remove=True)
    core.from_file = set(wanted) - core.from_flags
    logger.info(
        "SIGHUP: %d encoders in %s, %d new, %d to leave",
        len(wanted), path, len(wanted.keys() - present.keys()), len(gone),
    )  # fmt: skip

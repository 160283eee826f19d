"""SIGHUP: the list of encoders is read again; who is new joins, who is gone is drained and leaves.

A file that cannot be read or holds nonsense changes nothing, and the log says so.
"""

from eccon_proxy.core import Core
from eccon_proxy.drain import Drains
from eccon_proxy.log import logger
from eccon_proxy.settings import SettingsError, lines, normal_url

__all__ = ["reload"]


def reload(core: Core, drains: Drains) -> None:
    """Read the encoders' file again."""
    path = core.settings.encoders_file
    if not path:
        logger.warning("SIGHUP: no --encoders-file to read again")
        return
    try:
        wanted = [normal_url(line) for line in lines(path)]
        if len(core.pds) > 1:
            raise SettingsError("with several PDs encoders join by the admin API, which says their PD")
        if bad := {pd.url for pd in core.pds} & set(wanted):
            raise SettingsError(f"{', '.join(bad)} is a PD")
    except SettingsError as error:
        logger.error("SIGHUP: nothing changed: %s", error)
        return
    present = {e.url: e for e in core.encoders.values()}
    for url in dict.fromkeys(wanted):
        if url not in present:
            core.join(core.free_id(), url, core.pds[0])
        elif present[url].leaving:
            drains.resume(present[url])
    for url in core.from_file - set(wanted):
        if url in present:
            drains.begin(present[url], now=False, remove=True)
    core.from_file = set(wanted) - core.from_flags
    logger.info("SIGHUP: %d encoders in %s", len(core.from_file), path)

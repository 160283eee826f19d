"""The file of encoder URLs: what `--encoders-file` names, read at the start and again at SIGHUP."""

from collections.abc import Sequence

from eccon_proxy.settings import SettingsError, lines, normal_url

__all__ = ["listed"]


def listed(path: str, pds: Sequence[str]) -> dict[str, str]:
    """PD by encoder, in the file's order, all as normal URLs.

    A line is an encoder's URL, or, as in `--group` and needed with several PDs, `PD_URL=ENC_URL,ENC_URL`.
    Raises `SettingsError` that names file and line.
    """
    found: dict[str, str] = {}
    for line in lines(path):
        head, equals, tail = line.partition("=")
        try:
            pd = normal_url(head) if equals else None
            if pd is None and len(pds) > 1:
                raise SettingsError("with several PDs a line is PD_URL=ENC_URL,ENC_URL: who pushes to which")
            if pd is not None and pd not in pds:
                raise SettingsError(f"{pd} is not among --decode-servers-urls")
            members = [normal_url(one) for one in (tail if equals else line).split(",") if one.strip()]
            for url in members:
                if url in pds:
                    raise SettingsError(f"{url} is a PD")
                if found.setdefault(url, pd or pds[0]) != (pd or pds[0]):
                    raise SettingsError(f"{url} is named under two PDs: an encoder pushes to exactly one")
        except SettingsError as error:
            raise SettingsError(f"{path}: {line!r}: {error}") from None
    return found

"""Whether the cluster outlives the log-in that started it, and the unit that it runs in."""

from collections.abc import Iterator

from eccon.doctor.evidence import Evidence
from eccon.doctor.finding import Finding, bad, good, warn

__all__ = ["outlives_the_session"]


def outlives_the_session(e: Evidence) -> Iterator[Finding]:
    """systemd may end what a user started at log-out, and a unit's whole control group with the unit."""
    at = e.login
    if at.unit:
        advice = "set KillMode=process and Delegate=yes in that unit, or start eccon by `systemd-run --user`"
        yield bad("login", f"{at.unit} ends everything that it started when it stops", at.unit, advice=advice)
    elif at.session and at.kill_user_processes and not at.linger:
        advice = (
            f"`loginctl enable-linger {at.user}`, then start by `systemd-run --user --scope eccon up`: "
            "linger alone does not spare a session's own processes"
        )
        evidence = "KillUserProcesses=yes, no linger"
        yield bad("login", "the cluster would be ended when you log out", evidence, advice=advice)
    elif at.session and at.kill_user_processes:
        advice = "start by `systemd-run --user --scope eccon up`, so that it is not in the session's scope"
        yield warn("login", "what is started from this session ends with it", "KillUserProcesses=yes",
                   advice=advice)  # fmt: skip
    else:
        yield good("login", "the cluster outlives the session that starts it")

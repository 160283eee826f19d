"""Servers that have nothing to do with each other: launched at once, they start side by side."""

from dataclasses import dataclass

from tests.contract.target import Server, Target, free_port

__all__ = ["Starts"]


@dataclass
class Starts:
    """Of a PD, and of three that come to nothing."""

    port: int
    """Of the PD's connector."""
    pd: Server
    no_model: Server
    no_flag: Server
    no_port: Server

    @classmethod
    def begin(cls, target: Target, taken: int) -> "Starts":
        """Launch them, and do not wait. `taken` is a port that somebody holds."""
        port = free_port()
        return cls(
            port=port,
            pd=target.pd(port),
            no_model=target.launch("pd", "ec_consumer", {"pull_port": free_port()}, model="/nowhere/at/all"),
            no_flag=target.pd(free_port(), "--no-such-flag", "1"),
            no_port=target.launch("pd", "ec_consumer", {"pull_port": free_port()}, port=taken),
        )

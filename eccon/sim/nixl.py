"""The PD's side of NIXL: knowing an encoder's agent, and reading its memory without blocking.

Errors are raised, not returned, with NIXL's own names: nothing in the connector catches them.
"""

import socket

import msgspec

from eccon.sim.memory import REPLY, REQUEST, AgentMetadata

__all__ = ["NixlError", "Pull", "RemoteAgents"]


class NixlError(Exception):
    """`NIXL_ERR_BACKEND`: nobody is there. `NIXL_ERR_NOT_FOUND`: not registered as far as we know. Others."""


class Pull:
    """One read in flight. A connection of its own, so that reads of one peer do not wait for each other."""

    def __init__(self, agent: AgentMetadata, address: int, nbytes: int) -> None:
        try:
            self._socket = socket.create_connection((agent.host, agent.port), timeout=5)
            self._socket.sendall(REQUEST.pack(agent.key, address, nbytes))
        except OSError as e:
            msg = "NIXL_ERR_REMOTE_DISCONNECT"
            raise NixlError(msg) from e
        self._socket.setblocking(False)
        self._wanted = REPLY.size + nbytes
        self._got = bytearray()

    def state(self) -> str:
        """ "PROC" while it goes on, then "DONE".

        Raises:
            NixlError: the peer died, or does not hold that address any more.
        """
        while len(self._got) < self._wanted:
            try:
                piece = self._socket.recv(1 << 20)
            except BlockingIOError:
                return "PROC"
            except OSError:
                piece = b""
            self._got += piece
            if not piece or (len(self._got) >= REPLY.size and not REPLY.unpack_from(self._got)[0]):
                self.release()
                msg = "NIXL_ERR_REMOTE_DISCONNECT"
                raise NixlError(msg)
        return "DONE"

    def data(self) -> bytes:
        """What was read, once it is done."""
        return bytes(self._got[REPLY.size :])

    def release(self) -> None:
        """Let go of the read, done or not."""
        self._socket.close()


class RemoteAgents:
    """The peers that are known, each by the newest metadata it sent."""

    def __init__(self) -> None:
        self._agents: dict[str, AgentMetadata] = {}

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._agents

    def remove(self, engine_id: str) -> None:
        """Forget a peer."""
        del self._agents[engine_id]

    def add(self, engine_id: str, metadata: bytes) -> None:
        """Learn of a peer, which must be reachable at this moment.

        Raises:
            NixlError: junk, or nobody is there.
        """
        try:
            agent = msgspec.msgpack.decode(metadata, type=AgentMetadata)
        except msgspec.DecodeError as e:
            msg = "NIXL_ERR_MISMATCH"
            raise NixlError(msg) from e
        try:
            socket.create_connection((agent.host, agent.port), timeout=5).close()
        except OSError as e:
            msg = "NIXL_ERR_BACKEND"
            raise NixlError(msg) from e
        self._agents[engine_id] = agent

    def read(self, engine_id: str, address: int, nbytes: int) -> Pull:
        """Begin to read.

        Raises:
            NixlError: that address is not among the regions that the peer told us of, or it is gone.
        """
        agent = self._agents[engine_id]
        if not any(start <= address and address + nbytes <= start + size for start, size in agent.regions):
            msg = "NIXL_ERR_NOT_FOUND"
            raise NixlError(msg)
        return Pull(agent, address, nbytes)

"""An encoder's memory: addresses that are freed and used again, and the socket through which a PD reads them.

Stands for the encoder's pinned pages and for the reads that NIXL does over UCX. First fit, whole pages: an
item that is let go leaves its address to the next one of its size, which makes a stale address dangerous.
"""

import os
import secrets
import socket
import struct
import threading

import msgspec

__all__ = ["ADDRESS", "PAGE", "REPLY", "REQUEST", "AgentMetadata", "Arena", "MemoryServer"]

PAGE = 4096
REQUEST = struct.Struct("!16sQQ")
"""Key, address, bytes."""
REPLY = struct.Struct("!?Q")
"""Whether the address is registered, bytes that follow."""
ADDRESS = tuple[str, int]


class AgentMetadata(msgspec.Struct, frozen=True):
    """What is inside `agent_metadata`: where this encoder's memory is read, and what of it is registered."""

    name: str
    host: str
    port: int
    key: bytes
    regions: list[tuple[int, int]]


class Arena:
    """Page-aligned buffers at addresses of our own. Thread-safe: the server reads while the engine frees."""

    def __init__(self) -> None:
        # Another place in every process, like mmap's: an address of one encoder means nothing in another.
        self._origin = 0x7F00_0000_0000 + int.from_bytes(os.urandom(3), "big") * PAGE
        self._free: list[tuple[int, int]] = [(self._origin, 1 << 40)]
        self._used: dict[int, tuple[int, bytes]] = {}
        self._lock = threading.Lock()

    def allocate(self, data: bytes) -> int:
        """Put `data` at the lowest free address that has room for it."""
        size = max(1, -(-len(data) // PAGE)) * PAGE
        with self._lock:
            for i, (start, room) in enumerate(self._free):
                if room >= size:
                    self._free[i : i + 1] = [(start + size, room - size)] if room > size else []
                    self._used[start] = (size, data)
                    return start
        msg = "out of memory"
        raise MemoryError(msg)

    def free(self, address: int) -> None:
        """Give the address back, joined with its free neighbours."""
        with self._lock:
            size, _ = self._used.pop(address)
            rows = sorted([*self._free, (address, size)])
            joined = [rows[0]]
            for start, room in rows[1:]:
                last, length = joined[-1]
                if last + length == start:
                    joined[-1] = (last, length + room)
                else:
                    joined.append((start, room))
            self._free = joined

    def read(self, address: int, nbytes: int) -> bytes | None:
        """What lies there now; None where nothing is registered, or less than that."""
        with self._lock:
            held = self._used.get(address)
            return held[1][:nbytes] if held is not None and len(held[1]) >= nbytes else None

    def regions(self) -> list[tuple[int, int]]:
        """Address and length of every buffer that is held."""
        with self._lock:
            return [(start, len(data)) for start, (_, data) in self._used.items()]


class MemoryServer:
    """Lets the holder of the key read the arena, on a loopback port (or `host`) chosen by the system."""

    def __init__(self, arena: Arena, host: str) -> None:
        self._arena = arena
        self._key = secrets.token_bytes(16)
        self._socket = socket.create_server((host, 0), backlog=512)
        self._address: ADDRESS = self._socket.getsockname()[:2]
        threading.Thread(target=self._accept, name="nixl_listener", daemon=True).start()

    def metadata(self, name: str) -> bytes:
        """As it is now: what is registered later is not in it."""
        host, port = self._address
        return msgspec.msgpack.encode(AgentMetadata(name, host, port, self._key, self._arena.regions()))

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), name="nixl_peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as requests:
            try:
                while len(request := requests.read(REQUEST.size)) == REQUEST.size:
                    key, address, nbytes = REQUEST.unpack(request)
                    known = secrets.compare_digest(key, self._key)
                    data = self._arena.read(address, nbytes) if known else None
                    peer.sendall(REPLY.pack(data is not None, len(data or b"")) + (data or b""))
            except OSError:
                return  # the PD went away

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

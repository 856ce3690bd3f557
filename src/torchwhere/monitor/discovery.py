"""How monitors of several hosts find each other: by what that of host 0 leaves in the job's own
store, or by a likely port."""

from __future__ import annotations

import json
import os
import zlib
from typing import NamedTuple

from torchwhere.monitor.broadcast import run_key

_MOST_BYTES = 1 << 16
_PORTS = (20_000, 29_000)
_MOST_PORTS = 4


class Rendezvous(NamedTuple):
    """The job's own store, and the key under which the office is found there."""

    address: str
    port: int
    key: str

    @classmethod
    def from_environment(cls) -> Rendezvous | None:
        """None where no launcher has said where the store is."""
        return cls.at(f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}")

    @classmethod
    def at(cls, store: object) -> Rendezvous | None:
        """By `address:port`, as a box has it of a script that says so itself."""
        address, _, port = store.rpartition(":") if isinstance(store, str) else ("", "", "")
        return (
            cls(address, int(port), f"torchwhere/monitor/{run_key()}")
            if address and port.isdecimal()
            else None
        )

    @property
    def likely_ports(self) -> list[int]:
        """Where the office is, if these are free: for those who cannot ask any more. Below those
        that systems give away."""
        first = zlib.crc32(f"{self.key} {self.port}".encode()) % (
            _PORTS[1] - _PORTS[0] - _MOST_PORTS
        )
        return [_PORTS[0] + first + index for index in range(_MOST_PORTS)]


class ServerAddress(NamedTuple):
    """Where an office is."""

    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    token: str | None = None  # of the monitor there; None: whoever has an office for this run

    @classmethod
    def from_json(cls, data: bytes) -> ServerAddress:
        value = json.loads(data[:_MOST_BYTES])
        return cls(
            tuple(str(address) for address in value["addresses"][:8]),
            (int(value["port"]),),
            str(value["token"]),
        )

"""How the monitors of several hosts find the lead: by a key in the job's own store, or by a port
that both sides compute."""

from __future__ import annotations

import json
import os
import zlib
from typing import NamedTuple

from torchwhere.monitor.broadcast import run_key

_MOST_BYTES = 1 << 16
_PORTS = (20_000, 29_000)  # below the ports that operating systems assign
_MOST_PORTS = 4
_MOST_ADDRESSES = 8


class Rendezvous(NamedTuple):
    """The job's own store, and the key under which the lead puts its address."""

    address: str
    port: int
    key: str

    @classmethod
    def from_environment(cls) -> Rendezvous | None:
        """None if no launcher has set the address of the store."""
        return cls.at(f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}")

    @classmethod
    def at(cls, store: object) -> Rendezvous | None:
        """The store at `address:port`: a box holds that if the script sets it."""
        address, _, port = store.rpartition(":") if isinstance(store, str) else ("", "", "")
        if not address or not port.isdecimal():
            return None
        return cls(address, int(port), f"torchwhere/monitor/{run_key()}")

    @property
    def likely_ports(self) -> list[int]:
        """The ports that the lead tries first, for followers that cannot reach the job's store."""
        count = _PORTS[1] - _PORTS[0] - _MOST_PORTS
        first = _PORTS[0] + zlib.crc32(f"{self.key} {self.port}".encode()) % count
        return list(range(first, first + _MOST_PORTS))


class ServerAddress(NamedTuple):
    """Where the server of a lead may be."""

    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    token: str | None = None  # of the lead; None accepts any lead of this run

    @classmethod
    def from_json(cls, data: bytes) -> ServerAddress:
        value = json.loads(data[:_MOST_BYTES])
        return cls(
            tuple(str(address) for address in value["addresses"][:_MOST_ADDRESSES]),
            (int(value["port"]),),
            str(value["token"]),
        )

"""Process groups, and the streams of collectives and messages within them.

A box describes a group by a JSON object in its string table. The same group has the same
description on all its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

P2P = frozenset({"send", "recv"})


@dataclass(frozen=True, slots=True)
class Group:
    """A process group. It is equal on all its ranks."""

    name: str
    ranks: tuple[int, ...]
    desc: str = field(default="", compare=False)
    backend: str | None = field(default=None, compare=False)
    mesh_dim: str | None = field(default=None, compare=False)

    @property
    def title(self) -> str:
        """The name that users know: the mesh dimension, the description, or the name."""
        if self.mesh_dim:
            return self.mesh_dim
        if self.desc in ("default_pg", "") and self.name in ("0", ""):
            return "default"
        return self.desc if self.desc not in ("", "undefined") else self.name


class StreamName(NamedTuple):
    """Names a stream: calls that share one sequence of numbers on all their ranks.

    A stream holds either the collectives of a group (`source` and `destination` are -1) or the
    messages from one rank to another.
    """

    group: str
    source: int = -1
    destination: int = -1

    @property
    def is_p2p(self) -> bool:
        return self.source >= 0 or self.destination >= 0


def group_of(entry: Any) -> Group | None:
    """Reads the JSON value of a group entry; None if it does not describe a group."""
    name = text_of(entry, "name") if isinstance(entry, dict) else None
    if name is None:
        return None
    return Group(
        name,
        ranks_of(entry.get("ranks")),
        desc=text_of(entry, "desc") or "",
        backend=text_of(entry, "backend"),
        mesh_dim=text_of(entry, "mesh_dim"),
    )


def text_of(entry: Mapping[str, Any], key: str) -> str | None:
    """A text in a JSON object; None if there is none."""
    value = entry.get(key)
    return value if isinstance(value, str) else None


def ranks_of(value: Any) -> tuple[int, ...]:
    """A JSON list of ranks; empty if it is not a list."""
    return tuple(rank for rank in value if isinstance(rank, int)) if isinstance(value, list) else ()


def stream_ends(op: str, *, rank: int, peer: int) -> tuple[int, int]:
    """Source and destination of the stream that a rank counts a call in; -1 for a collective.

    `peer` is -1 if it is unknown.
    """
    if op not in P2P:
        return -1, -1
    return (rank, peer) if op == "send" else (peer, rank)

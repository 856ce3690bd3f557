"""Roles of streams: the tensor-parallel pairs of a mesh are different groups with the same role.

Takes the groups of a job, gives a `Role` for a rank and a stream. Groups of a mesh are identified
by their dimension; others by their size and by the order in which torch created them, which is the
same on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey


class Role(NamedTuple):
    """Equal for streams that do the same for their ranks."""

    # its mesh dimension, or its place among the groups of this size that the rank is in
    group: str | int
    size: int
    offset: int = 0  # of a message, how far the peer is from the rank within the group
    direction: str = ""
    # of a message, the place of the rank within the group: stages of a pipeline differ
    stage: int = -1


class Roles:
    """The roles of all streams of a job."""

    def __init__(self, job_calls: JobCalls) -> None:
        self._job_calls = job_calls
        self._of_groups: defaultdict[int, dict[str, Role]] = defaultdict(dict)  # of each rank
        for group in sorted(
            job_calls.shared_ids.groups, key=lambda group: (len(group.name), group.name)
        ):
            for rank in group.ranks:
                mine, size = self._of_groups[rank], len(group.ranks)
                mine[group.name] = Role(
                    group.mesh_dim or sum(role.size == size for role in mine.values()), size
                )

    def of(self, rank: int, key: StreamKey) -> Role:
        group = self._job_calls.group(key)
        role = self._of_groups[rank].get(group.name, Role(-1, len(group.ranks)))
        if key.source == key.destination:
            return role
        peer, direction = (key.destination, "send") if key.source == rank else (key.source, "recv")
        if rank not in group.ranks or peer not in group.ranks:
            return role._replace(direction=direction, stage=rank)
        stage = group.ranks.index(rank)
        offset = (group.ranks.index(peer) - stage) % role.size
        return role._replace(offset=offset, direction=direction, stage=stage)

    def takes_part(self, rank: int, role: Role) -> bool:
        """Whether a rank is in a group with this role."""
        return role in self._of_groups[rank].values()

    def of_messages(self, rank: int) -> frozenset[Role]:
        """The roles in which a rank has sent or received messages."""
        keys = self._job_calls.by_rank[rank].counts
        return frozenset(self.of(rank, key) for key in keys if key.source != key.destination)

"""Checks what differs between ranks by design: the shards of parameters, and the members of groups.

Gives facts about uneven shards and sibling groups, and about errors: a shard that its placements
do not give, ranks that disagree about the members of a group.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from torchwhere.core.model_layout import FLAT, Layout, Mesh, Node, Param
from torchwhere.core.rank_text import ranks_from_text
from torchwhere.core.results import Fact
from torchwhere.diagnose.layout.facts import (
    GroupDisagreement,
    MoreWrongShards,
    NotAMember,
    SiblingGroups,
    UnevenShards,
    WrongShard,
)

# different sets of local shapes that are compared; an FSDP1 job has one for each rank
_MOST_LAYOUTS = 64
_MOST_LISTED = 4
_RUN = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?")
_SHARD = re.compile(r"(Strided)?Shard\((\d+)")

# -- shards ----------------------------------------------------------------------------------------


class ShardCheck:
    """Compares the shards that the ranks of one cohort hold of the same parameters."""

    def __init__(self) -> None:
        # by number of a set of local shapes
        self._ranks: dict[int, list[int]] = {}
        self._layouts: dict[int, Layout] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._wrong: list[Fact] = []

    def add(self, layout: Layout) -> None:
        shapes = tuple(shape for root in layout.roots for shape in _local_shapes(root.node))
        number = self._numbers.setdefault(shapes, len(self._numbers))
        self._ranks.setdefault(number, []).append(layout.rank)
        if number < _MOST_LAYOUTS:
            self._layouts.setdefault(number, layout)
        self._wrong += itertools.islice(_wrong_shards(layout), 2)

    def expected(self) -> Iterator[Fact]:
        """Parameters of which ranks hold different amounts."""
        first, *others = self._layouts.values()
        uneven: dict[str, Param] = {}
        for other in others[:8]:
            pairs = zip(first.params(), other.params(), strict=False)
            uneven |= {
                name: param
                for (name, param), (_, there) in pairs
                if param.local_shape != there.local_shape
            }
        for is_flat in (False, True):
            names = [
                name for name, param in uneven.items() if (FLAT in param.placements) is is_flat
            ]
            if names:
                yield UnevenShards(len(names), is_flat, names[0], self._shapes(names[0]))

    def _shapes(self, name: str) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for number, layout in self._layouts.items():
            shape = next((param.local_shape for full, param in layout.params() if full == name), ())
            by_shape.setdefault(tuple(shape), []).extend(self._ranks[number])
        return tuple((shape, tuple(ranks)) for shape, ranks in by_shape.items())

    def wrong(self) -> Iterator[Fact]:
        """Shards that differ from their placements."""
        yield from self._wrong[:_MOST_LISTED]
        if len(self._wrong) > _MOST_LISTED:
            yield MoreWrongShards()


def _local_shapes(node: Node) -> Iterator[object]:
    for param in node.params:
        yield param.local_shape
    for branch in node.children:
        yield branch.name, branch.count
        yield from _local_shapes(branch.node)


def _wrong_shards(layout: Layout) -> Iterator[Fact]:
    """Shards that differ from their placements. Checks only the first of folded layers."""
    pending = [(root.name, root.node) for root in layout.roots]
    while pending:
        name, node = pending.pop()
        for param in node.params:
            expected = expected_shard(param, layout)
            if expected is not None and expected != param.local_shape:
                yield WrongShard(
                    rank=layout.rank,
                    param=f"{name}.{param.name}" if name else param.name,
                    shape=param.shape,
                    held=param.local_shape,
                    placements=param.placements,
                    expected=expected,
                )
        pending += [
            (f"{name}.{branch.name}" if name else branch.name, branch.node)
            for branch in node.children
        ]


def expected_shard(param: Param, layout: Layout) -> tuple[int, ...] | None:
    """The local shape that the placements give with the cuts of `torch.chunk`; None if unknown."""
    if param.mesh is None or param.mesh >= len(layout.meshes) or FLAT in param.placements:
        return None
    mesh, shape = layout.meshes[param.mesh], list(param.shape)
    coordinate = _coordinate(mesh, layout.rank)
    if coordinate is None or len(param.placements) != len(coordinate):
        return None
    matches = [(mesh_dim, _SHARD.match(text)) for mesh_dim, text in enumerate(param.placements)]
    cuts = [(bool(match[1]), mesh_dim, int(match[2])) for mesh_dim, match in matches if match]
    for _, mesh_dim, dim in sorted(cuts):  # a strided shard is cut after the others
        if dim >= len(shape):
            return None
        chunk = shape[dim]
        if mesh.shape[mesh_dim]:
            chunk = math.ceil(shape[dim] / mesh.shape[mesh_dim])
        shape[dim] = max(0, min(chunk, shape[dim] - chunk * coordinate[mesh_dim]))
    return tuple(shape)


def _coordinate(mesh: Mesh, rank: int) -> list[int] | None:
    indexes = [_index(group, rank) for group in mesh.groups]
    coordinate = [index for index in indexes if index is not None]
    # shorter if this rank is not part of the mesh
    return coordinate if len(coordinate) == len(mesh.shape) else None


def _index(group: str, rank: int) -> int | None:
    """The index of a rank in a list of ranks given as text. Does not unfold the list: that would
    be quadratic in the ranks."""
    before = 0
    for run in group.split(", "):
        match = _RUN.fullmatch(run)
        if match is None:
            return None
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if first <= rank <= last and (rank - first) % step == 0:
            return before + (rank - first) // step
        before += (last - first) // step + 1
    return None


# -- groups ----------------------------------------------------------------------------------------


class GroupMembership:
    """The members of each rank's groups, along each dimension of each mesh."""

    def __init__(self) -> None:
        # by label, dimension, and number of the mesh among those with that label
        self._groups: dict[tuple[str, str, int], dict[str, list[int]]] = {}

    def add(self, layout: Layout) -> None:
        uses: dict[str, int] = {}
        for mesh in layout.meshes:
            nth = uses[mesh.label] = uses.get(mesh.label, -1) + 1
            for dim, group in zip(mesh.dims, mesh.groups, strict=False):
                if group:
                    groups = self._groups.setdefault((mesh.label, dim, nth), {})
                    groups.setdefault(group, []).append(layout.rank)

    def expected(self) -> list[Fact]:
        """Sibling groups, each set once."""
        facts = [
            SiblingGroups("" if dim else label, dim, tuple(groups))
            for (label, dim, _), groups in self._groups.items()
            if len(groups) > 1
        ]
        return list(dict.fromkeys(facts))

    def disagreements(self) -> Iterator[Fact]:
        for (label, dim, _), groups in self._groups.items():
            yield from itertools.islice(_disagreements(dim or label, groups), _MOST_LISTED)


def _disagreements(along: str, groups: dict[str, list[int]]) -> Iterator[Fact]:
    group_of = {rank: group for group, ranks in groups.items() for rank in ranks}
    for group, ranks in groups.items():
        try:
            members = ranks_from_text(group)
        except ValueError:
            continue
        member_set = set(members)
        for rank in ranks:
            if rank not in member_set:
                yield NotAMember(rank, along, group)
        for member in members:
            if group_of.get(member, group) != group:
                yield GroupDisagreement(along, tuple(ranks), group, member, group_of[member])

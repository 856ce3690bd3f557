"""What differs between ranks because it must: the part of each parameter that a rank holds, and who
is in its groups.

Says it in words, and says where it does not fit together: a part that is not the one the placements
give, ranks that disagree about who is in a group.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator

from torchwhere.core.model_layout import (
    FLAT,
    Layout,
    Mesh,
    Node,
    Param,
)
from torchwhere.core.rank_text import ranks_from_text, ranks_to_text

# layouts with different parts that are looked at; an FSDP1 job has one for each rank
_MOST_KEPT = 64
_MOST_SAID = 4
_RUN = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?")
_SHARD = re.compile(r"(Strided)?Shard\((\d+)")


def ranks_phrase(ranks: Iterable[int]) -> str:
    text = ranks_to_text(sorted(ranks))
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def _few(texts: list[str]) -> str:
    return "; ".join(texts[:_MOST_SAID]) + (
        f"; and {len(texts) - _MOST_SAID} more" if len(texts) > _MOST_SAID else ""
    )


# -- parts of parameters ---------------------------------------------------------------------------


class ShardCheck:
    """The parts that ranks hold of the same parameters. Given the layouts of one cohort."""

    def __init__(self) -> None:
        self._ranks: dict[int, list[int]] = {}  # by a number for everything that a rank holds
        self._kept: dict[int, Layout] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._wrong: list[str] = []

    def add(self, layout: Layout) -> None:
        key = tuple(part for root in layout.roots for part in _parts(root.node))
        number = self._numbers.setdefault(key, len(self._numbers))
        self._ranks.setdefault(number, []).append(layout.rank)
        if number < _MOST_KEPT:
            self._kept.setdefault(number, layout)
        self._wrong += itertools.islice(_wrong_parts(layout), 2)

    def expected(self) -> Iterator[str]:
        """The parameters of which ranks hold different amounts, with one of them as an example."""
        first, *others = self._kept.values()
        uneven: dict[str, Param] = {}
        for other in others[:8]:
            pairs = zip(first.params(), other.params(), strict=False)
            uneven |= {
                name: param
                for (name, param), (_, there) in pairs
                if param.local_shape != there.local_shape
            }
        for is_flat, how in (
            (False, "not cut evenly"),
            (True, "cut as they lie one after the other"),
        ):
            names = [
                name for name, param in uneven.items() if (FLAT in param.placements) is is_flat
            ]
            if names:
                count = f"{len(names)} parameters are" if len(names) > 1 else "1 parameter is"
                yield f"{count} {how}: {names[0]} is {self._shapes(names[0])}"

    def _shapes(self, name: str) -> str:
        ranks: dict[str, list[int]] = {}
        for number, layout in self._kept.items():
            shape = next((param.local_shape for full, param in layout.params() if full == name), ())
            ranks.setdefault(str(list(shape)), []).extend(self._ranks[number])
        return _few([f"{shape} on {ranks_phrase(found)}" for shape, found in ranks.items()])

    def remarks(self) -> Iterator[str]:
        yield from self._wrong[:_MOST_SAID]
        if len(self._wrong) > _MOST_SAID:
            yield "and others are not as their placements give them either"


def _parts(node: Node) -> Iterator[object]:
    for param in node.params:
        yield param.local_shape
    for branch in node.children:
        yield branch.name, branch.count
        yield from _parts(branch.node)


def _wrong_parts(layout: Layout) -> Iterator[str]:
    """Parts that are not what the placements give. Of parameters that stand for many only the first
    is looked at."""
    pending = [(root.name, root.node) for root in layout.roots]
    while pending:
        name, node = pending.pop()
        for param in node.params:
            expected = expected_part(param, layout)
            if expected not in (None, param.local_shape):
                full = f"{name}.{param.name}" if name else param.name
                held, given = list(param.local_shape), list(expected or ())
                said = f"rank {layout.rank} holds {held} of {full} {list(param.shape)}"
                yield f"{said}; {', '.join(param.placements)} gives {given}"
        pending += [
            (f"{name}.{branch.name}" if name else branch.name, branch.node)
            for branch in node.children
        ]


def expected_part(param: Param, layout: Layout) -> tuple[int, ...] | None:
    """What this rank holds of a parameter if it is cut as `torch.chunk` cuts; None where that
    cannot be told."""
    if param.mesh is None or param.mesh >= len(layout.meshes) or FLAT in param.placements:
        return None
    mesh, shape = layout.meshes[param.mesh], list(param.shape)
    at = _coordinate(mesh, layout.rank)
    if at is None or len(param.placements) != len(at):
        return None
    cuts = [
        (bool(found[1]), dim, int(found[2]))
        for dim, text in enumerate(param.placements)
        if (found := _SHARD.match(text))
    ]
    for _, dim, of in sorted(cuts):  # a strided cut is made in what the others leave
        if of >= len(shape):
            return None
        each = math.ceil(shape[of] / mesh.shape[dim]) if mesh.shape[dim] else shape[of]
        shape[of] = max(0, min(each, shape[of] - each * at[dim]))
    return tuple(shape)


def _coordinate(mesh: Mesh, rank: int) -> list[int] | None:
    found = [at for group in mesh.groups if (at := _index(group, rank)) is not None]
    # else a mesh that this rank is not part of
    return found if len(found) == len(mesh.shape) else None


def _index(group: str, rank: int) -> int | None:
    """Where a rank is in a list of ranks given as text, without unfolding it: that would be
    quadratic in the ranks."""
    before = 0
    for run in group.split(", "):
        found = _RUN.fullmatch(run)
        if found is None:
            return None
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if first <= rank <= last and (rank - first) % step == 0:
            return before + (rank - first) // step
        before += (last - first) // step + 1
    return None


# -- groups ----------------------------------------------------------------------------------------


class GroupMembership:
    """Who says to be together with whom, along each dimension of each mesh."""

    def __init__(self) -> None:
        # label, dimension, which of that label
        self._groups: dict[tuple[str, str, int], dict[str, list[int]]] = {}

    def add(self, layout: Layout) -> None:
        times: dict[str, int] = {}
        for mesh in layout.meshes:
            nth = times[mesh.label] = times.get(mesh.label, -1) + 1
            for dim, group in zip(mesh.dims, mesh.groups, strict=False):
                if group:
                    self._groups.setdefault((mesh.label, dim, nth), {}).setdefault(
                        group, []
                    ).append(layout.rank)

    def expected(self) -> Iterator[str]:
        said: set[str] = set()
        for (label, dim, _), groups in self._groups.items():
            if len(groups) > 1:
                what = f"along {dim}" if dim else f"of {label}"
                text = f"the groups {what} have different ranks: {_few(list(groups))}"
                if text not in said:
                    said.add(text)
                    yield text

    def disagreements(self) -> Iterator[str]:
        for (label, dim, _), groups in self._groups.items():
            yield from itertools.islice(_disagreements(dim or label, groups), _MOST_SAID)


def _disagreements(what: str, groups: dict[str, list[int]]) -> Iterator[str]:
    said_by = {rank: group for group, ranks in groups.items() for rank in ranks}
    for group, ranks in groups.items():
        try:
            members = ranks_from_text(group)
        except ValueError:
            continue
        known = set(members)
        for rank in ranks:
            if rank not in known:
                yield f"rank {rank} says that its group along {what} is {group}, which it is not in"
        for member in members:
            if said_by.get(member, group) != group:
                say = "say" if len(ranks) > 1 else "says"
                yield (
                    f"along {what} {ranks_phrase(ranks)} {say} {group}, but rank {member} says"
                    f" {said_by[member]}"
                )

"""Facts about the layouts of many ranks: differences by design, disagreements, unusual shards."""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.core.rank_text import Ranks
from torchwhere.core.results import Fact, plain_fields

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayoutDifference(Fact):
    """A module, unit or parameter that differs: its name, the property, and its values here and on
    the compared ranks."""

    where: str
    what: str
    here: str
    there: str

    def to_dict(self) -> dict[str, str]:
        return plain_fields(self)


@dataclass(frozen=True, slots=True)
class StageModules(Fact):
    """The ranks of each pipeline stage, or set of stages: their modules differ by design."""

    ranks: tuple[tuple[tuple[int, ...], Ranks], ...]


@dataclass(frozen=True, slots=True)
class SiblingGroups(Fact):
    """Ranks are in different groups along a mesh dimension, by design."""

    label: str  # of the mesh
    dim: str  # "" without a name
    groups: tuple[str, ...]  # as `core.model_layout.ranks_to_text` writes them


@dataclass(frozen=True, slots=True)
class UnevenShards(Fact):
    """Ranks hold different amounts of `count` parameters; `example` is the first one."""

    count: int
    is_flat: bool  # cut anywhere in the flattened parameters
    example: str
    shapes: tuple[tuple[Shape, Ranks], ...]  # of the example


@dataclass(frozen=True, slots=True)
class NotAMember(Fact):
    """A rank records a group that it is not in."""

    rank: int
    along: str
    group: str


@dataclass(frozen=True, slots=True)
class GroupDisagreement(Fact):
    """Ranks record a group with a member that records another group."""

    along: str
    ranks: Ranks
    group: str
    member: int
    group_of_member: str


@dataclass(frozen=True, slots=True)
class LayoutsChanged(Fact):
    """The layouts of these ranks changed after the first step."""

    ranks: Ranks


@dataclass(frozen=True, slots=True)
class NoLayouts(Fact):
    """These ranks recorded no layout."""

    ranks: Ranks


@dataclass(frozen=True, slots=True)
class WrongShard(Fact):
    """A rank holds another shard of a parameter than its placements give."""

    rank: int
    param: str
    shape: Shape
    held: Shape
    placements: tuple[str, ...]
    expected: Shape


@dataclass(frozen=True, slots=True)
class MoreWrongShards(Fact):
    """There are more wrong shards than listed."""

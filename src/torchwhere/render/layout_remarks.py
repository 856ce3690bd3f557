"""The sentences of a layout comparison. Takes a `LayoutRemark`, gives one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

from torchwhere.core.rank_text import ranks_from_text, ranks_phrase, ranks_text
from torchwhere.diagnose.layout.remarks import (
    GroupDisagreement,
    LayoutDifference,
    LayoutRemark,
    MoreWrongShards,
    NotAMember,
    SiblingGroups,
    StageModules,
    UnevenShards,
    WrongShard,
)

_MOST_LISTED = 4
_MOST_RUNS = 12  # of ranks in a group


def group_text(ranks: str) -> str:
    """The ranks of a stored mesh or group as every view spells them: `0-12:4` is `0, 4, 8, 12`."""
    if ":" not in ranks:
        return ranks
    try:
        return ranks_text(ranks_from_text(ranks), most=_MOST_RUNS)
    except ValueError:  # not written by torchwhere
        return ranks


@singledispatch
def remark_text(remark: LayoutRemark) -> str:
    """The sentence of one remark."""
    raise TypeError(f"no sentence for {type(remark).__name__}")


@remark_text.register
def _(remark: LayoutDifference) -> str:
    return f"{remark.where}: {remark.what} is {remark.here}, elsewhere {remark.there}"


@remark_text.register
def _(remark: StageModules) -> str:
    stages = [f"{_stages_text(stages)} on {ranks_phrase(ranks)}" for stages, ranks in remark.ranks]
    return f"each pipeline stage has its own modules: {'; '.join(stages)}"


def _stages_text(stages: tuple[int, ...]) -> str:
    if not stages:
        return "no stage"
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


@remark_text.register
def _(remark: SiblingGroups) -> str:
    where = f"along {remark.dim}" if remark.dim else f"of {remark.label}"
    return f"the groups {where} have different ranks: {_few(list(map(group_text, remark.groups)))}"


@remark_text.register
def _(remark: UnevenShards) -> str:
    parameters = "1 parameter is" if remark.count == 1 else f"{remark.count:,} parameters are"
    how = "sharded as one flat tensor" if remark.is_flat else "not sharded evenly"
    shapes = [f"{list(shape)} on {ranks_phrase(ranks)}" for shape, ranks in remark.shapes]
    return f"{parameters} {how}: {remark.example} is {_few(shapes)}"


@remark_text.register
def _(remark: NotAMember) -> str:
    return (
        f"rank {remark.rank} records ranks {group_text(remark.group)} as its group along"
        f" {remark.along}, but is not one of them"
    )


@remark_text.register
def _(remark: GroupDisagreement) -> str:
    verb = "record" if len(remark.ranks) > 1 else "records"
    return (
        f"along {remark.along} {ranks_phrase(remark.ranks)} {verb} the group"
        f" {group_text(remark.group)}, but rank {remark.member} records"
        f" {group_text(remark.group_of_member)}"
    )


@remark_text.register
def _(remark: WrongShard) -> str:
    return (
        f"rank {remark.rank} holds {list(remark.held)} of {remark.param} {list(remark.shape)};"
        f" {', '.join(remark.placements)} gives {list(remark.expected)}"
    )


@remark_text.register
def _(remark: MoreWrongShards) -> str:
    return "other shards differ from their placements too"


def _few(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _MOST_LISTED} more" if len(texts) > _MOST_LISTED else ""
    return "; ".join(texts[:_MOST_LISTED]) + more

"""The sentences of a comparison of layouts."""

from __future__ import annotations

from collections.abc import Sequence

from torchwhere.core.rank_text import ranks_from_text, ranks_phrase, ranks_text
from torchwhere.diagnose.layout.facts import (
    GroupDisagreement,
    LayoutDifference,
    LayoutsChanged,
    MoreWrongShards,
    NoLayouts,
    NotAMember,
    SiblingGroups,
    StageModules,
    UnevenShards,
    WrongShard,
)
from torchwhere.render.fact_text.dispatch import fact_text

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


@fact_text.register
def _(fact: LayoutDifference) -> str:
    return f"{fact.where}: {fact.what} is {fact.here}, elsewhere {fact.there}"


@fact_text.register
def _(fact: StageModules) -> str:
    stages = [f"{_stages_text(stages)} on {ranks_phrase(ranks)}" for stages, ranks in fact.ranks]
    return f"each pipeline stage has its own modules: {'; '.join(stages)}"


def _stages_text(stages: tuple[int, ...]) -> str:
    if not stages:
        return "no stage"
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


@fact_text.register
def _(fact: SiblingGroups) -> str:
    where = f"along {fact.dim}" if fact.dim else f"of {fact.label}"
    return f"the groups {where} have different ranks: {_few(list(map(group_text, fact.groups)))}"


@fact_text.register
def _(fact: UnevenShards) -> str:
    parameters = "1 parameter is" if fact.count == 1 else f"{fact.count:,} parameters are"
    how = "sharded as one flat tensor" if fact.is_flat else "not sharded evenly"
    shapes = [f"{list(shape)} on {ranks_phrase(ranks)}" for shape, ranks in fact.shapes]
    return f"{parameters} {how}: {fact.example} is {_few(shapes)}"


@fact_text.register
def _(fact: NotAMember) -> str:
    return (
        f"rank {fact.rank} records ranks {group_text(fact.group)} as its group along"
        f" {fact.along}, but is not one of them"
    )


@fact_text.register
def _(fact: GroupDisagreement) -> str:
    verb = "record" if len(fact.ranks) > 1 else "records"
    return (
        f"along {fact.along} {ranks_phrase(fact.ranks)} {verb} the group"
        f" {group_text(fact.group)}, but rank {fact.member} records"
        f" {group_text(fact.group_of_member)}"
    )


@fact_text.register
def _(fact: LayoutsChanged) -> str:
    return (
        f"the layout of {ranks_phrase(fact.ranks)} changed after the first step; this is the last"
        " layout"
    )


@fact_text.register
def _(fact: NoLayouts) -> str:
    return f"no layout of {ranks_phrase(fact.ranks)}"


@fact_text.register
def _(fact: WrongShard) -> str:
    return (
        f"rank {fact.rank} holds {list(fact.held)} of {fact.param} {list(fact.shape)};"
        f" {', '.join(fact.placements)} gives {list(fact.expected)}"
    )


@fact_text.register
def _(fact: MoreWrongShards) -> str:
    return "other shards differ from their placements too"


def _few(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _MOST_LISTED} more" if len(texts) > _MOST_LISTED else ""
    return "; ".join(texts[:_MOST_LISTED]) + more

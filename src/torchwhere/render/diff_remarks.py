"""The sentences of a comparison's remarks. Takes a `DiffRemark`, gives one sentence."""

from __future__ import annotations

from functools import singledispatch

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.core.sanitize import plural
from torchwhere.diagnose.diff.remarks import (
    DifferingSteps,
    DiffRemark,
    EventCounts,
    GraphCounts,
    LogsCut,
    LogsRejoin,
    LogsStayApart,
    MoreDivergences,
    NoCommonStep,
    NotEnded,
    OtherThreads,
    PipelineStages,
    WindowStarts,
)

_MOST_LISTED = 8  # ranks or stages in one sentence


@singledispatch
def remark_text(remark: DiffRemark) -> str:
    """The sentence of one remark."""
    raise TypeError(f"no sentence for {type(remark).__name__}")


@remark_text.register
def _(remark: LogsCut) -> str:
    return f"only the first {remark.lines:,} lines of each log were compared"


@remark_text.register
def _(remark: MoreDivergences) -> str:
    return f"{plural(remark.count, 'further divergence')} not shown"


@remark_text.register
def _(remark: WindowStarts) -> str:
    return (
        f"compared from step {remark.step}: {ranks_phrase(remark.ranks)} recorded no earlier step"
        " completely (--records keeps more)"
    )


@remark_text.register
def _(remark: NoCommonStep) -> str:
    return (
        "no step is complete on all ranks: only the collectives of each group were compared, by"
        " number (--records keeps more)"
    )


@remark_text.register
def _(remark: NotEnded) -> str:
    verb, whose = ("has", "its") if len(remark.ranks) == 1 else ("have", "their")
    return f"{ranks_phrase(remark.ranks)} {verb} not ended: compared up to {whose} last event"


@remark_text.register
def _(remark: OtherThreads) -> str:
    return f"left out {plural(remark.events, 'event')} of other threads, which have no fixed order"


@remark_text.register
def _(remark: GraphCounts) -> str:
    listed = [f"rank {rank} {count}" for rank, count in remark.by_rank[:_MOST_LISTED]]
    return f"graphs compiled: {', '.join(listed)}; the others {remark.usual}"


@remark_text.register
def _(remark: PipelineStages) -> str:
    stages = "; ".join(ranks_phrase(ranks) for ranks in remark.stages[:_MOST_LISTED])
    more = "; ..." if len(remark.stages) > _MOST_LISTED else ""
    return (
        f"{len(remark.stages)} pipeline stages, which differ by design (first in step"
        f" {remark.step}: {remark.first_event} of {ranks_phrase(remark.first_ranks)}):"
        f" {stages}{more}"
    )


@remark_text.register
def _(remark: EventCounts) -> str:
    events = f"{remark.kind} events" + (f" on {remark.group}" if remark.group else "")
    return (
        f"in step {remark.step} {ranks_phrase(remark.minority)} had {remark.minority_events}"
        f" {events}; {ranks_phrase(remark.majority)} had {remark.majority_events}"
    )


@remark_text.register
def _(remark: DifferingSteps) -> str:
    if remark.differing == 1:
        return f"they differ only in this step, of {remark.common}"
    return (
        f"they differ in {remark.differing} of {remark.common} steps: {remark.first} to"
        f" {remark.last}"
    )


@remark_text.register
def _(remark: LogsRejoin) -> str:
    extra = [
        f"{plural(count, 'line')} of {ranks_phrase(ranks)}" for count, ranks in remark.extra_lines
    ]
    return f"they agree again after {' and '.join(extra)}"


@remark_text.register
def _(remark: LogsStayApart) -> str:
    return f"they do not agree again in the next {remark.lines} lines"

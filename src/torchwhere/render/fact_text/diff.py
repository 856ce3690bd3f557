"""The sentences of a comparison of ranks."""

from __future__ import annotations

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.core.sanitize import plural
from torchwhere.diagnose.diff.facts import (
    DifferingSteps,
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
from torchwhere.render.fact_text.dispatch import fact_text

_MOST_LISTED = 8  # ranks or stages in one sentence


@fact_text.register
def _(fact: LogsCut) -> str:
    return f"only the first {fact.lines:,} lines of each log were compared"


@fact_text.register
def _(fact: MoreDivergences) -> str:
    return f"{plural(fact.count, 'further divergence')} not shown"


@fact_text.register
def _(fact: WindowStarts) -> str:
    return (
        f"compared from step {fact.step}: {ranks_phrase(fact.ranks)} recorded no earlier step"
        " completely (--records keeps more)"
    )


@fact_text.register
def _(fact: NoCommonStep) -> str:
    return (
        "no step is complete on all ranks: only the collectives of each group were compared, by"
        " number (--records keeps more)"
    )


@fact_text.register
def _(fact: NotEnded) -> str:
    verb, whose = ("has", "its") if len(fact.ranks) == 1 else ("have", "their")
    return f"{ranks_phrase(fact.ranks)} {verb} not ended: compared up to {whose} last event"


@fact_text.register
def _(fact: OtherThreads) -> str:
    return f"left out {plural(fact.events, 'event')} of other threads, which have no fixed order"


@fact_text.register
def _(fact: GraphCounts) -> str:
    listed = [f"rank {rank} {count}" for rank, count in fact.by_rank[:_MOST_LISTED]]
    return f"graphs compiled: {', '.join(listed)}; the others {fact.usual}"


@fact_text.register
def _(fact: PipelineStages) -> str:
    stages = "; ".join(ranks_phrase(ranks) for ranks in fact.stages[:_MOST_LISTED])
    more = "; ..." if len(fact.stages) > _MOST_LISTED else ""
    return (
        f"{len(fact.stages)} pipeline stages, which differ by design (first in step"
        f" {fact.step}: {fact.first_event} of {ranks_phrase(fact.first_ranks)}):"
        f" {stages}{more}"
    )


@fact_text.register
def _(fact: EventCounts) -> str:
    events = f"{fact.kind} events" + (f" on {fact.group}" if fact.group else "")
    return (
        f"in step {fact.step} {ranks_phrase(fact.minority)} had {fact.minority_events}"
        f" {events}; {ranks_phrase(fact.majority)} had {fact.majority_events}"
    )


@fact_text.register
def _(fact: DifferingSteps) -> str:
    if fact.differing == 1:
        return f"they differ only in this step (1 of {fact.common})"
    return f"they differ in {fact.differing} of {fact.common} steps: {fact.first} to {fact.last}"


@fact_text.register
def _(fact: LogsRejoin) -> str:
    extra = [
        f"{plural(count, 'line')} of {ranks_phrase(ranks)}" for count, ranks in fact.extra_lines
    ]
    return f"they agree again after {' and '.join(extra)}"


@fact_text.register
def _(fact: LogsStayApart) -> str:
    return f"they do not agree again in the next {fact.lines} lines"

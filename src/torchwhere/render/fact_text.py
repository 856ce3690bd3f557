"""The sentences of facts about comparisons, layouts, reports and dumps.

`SENTENCES` has one entry for each class of facts: a template, or a function for a sentence that
depends on more than the number of its ranks. A template names fields as an f-string does, with four
further formats:

    {fact.ranks:ranks}           `rank 2`, `ranks 0-3, 7`
    {fact.count:count line}      `1 line`, `1,024 lines`
    {fact.ranks:has|have}        the first word for one, the second for several
    {fact.group:group}           the ranks of a stored group
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from string import Formatter
from typing import Any

from torchwhere.core.rank_text import Ranks, ranks_from_text, ranks_phrase, ranks_text
from torchwhere.core.results import Fact
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
from torchwhere.diagnose.dump_facts import (
    AllDevicesInCall,
    CompletedCalls,
    DevicesBehind,
    DeviceStates,
    DumpCaveat,
    DumpsAgree,
    EarlierMismatch,
    GlooLimits,
    GroupLost,
    JobContinued,
    MessagesLost,
    NoStacks,
    OnlyActiveCalls,
    OnlyIssuedCalls,
    OtherDumps,
    TooManyDumps,
    UnseenHangs,
    WrappedRings,
)
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
from torchwhere.diagnose.report.facts import (
    CohortDiffers,
    ComparedLayouts,
    DifferingCall,
    DiffersByDesign,
    EarlierBoxes,
    LayoutsEqual,
    ModulesNote,
    MoreLayouts,
    NoDeviceTimes,
    NoStepParts,
    ShownCalls,
    UnusualShard,
)
from torchwhere.render.verdict_text.phrases import call_text

_MOST_LISTED = 8  # ranks or stages in one sentence
_MOST_PARTS = 4  # of a sentence
_MOST_RUNS = 12  # of ranks in a group
NO_TIMES = "No times of modules were recorded. To record them: torchwhere run --module-events"
ONLY_FORWARD = (
    "Times are those of forward and recompute calls, on the clock of the CPU: a backward has no"
    " module calls to time."
)


def fact_text(fact: Fact) -> str:
    """Returns the sentence of one fact."""
    sentence = SENTENCES[type(fact)]
    return _FORMATTER.format(sentence, fact=fact) if isinstance(sentence, str) else sentence(fact)


class _FactFormatter(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "ranks":
            return ranks_phrase(value)
        if format_spec == "group":
            return group_text(value)
        if format_spec.startswith("count "):
            return plural(value, format_spec.removeprefix("count "))
        if "|" in format_spec:
            one, several = format_spec.split("|")
            count = value if isinstance(value, int) else len(value)
            return one if count == 1 else several
        return str(super().format_field(value, format_spec))


_FORMATTER = _FactFormatter()


def group_text(ranks: str) -> str:
    """The ranks of a stored mesh or group as every view spells them: `0-12:4` is `0, 4, 8, 12`."""
    if ":" not in ranks:
        return ranks
    try:
        return ranks_text(ranks_from_text(ranks), most=_MOST_RUNS)
    except ValueError:  # not written by torchwhere
        return ranks


# -- comparisons -----------------------------------------------------------------------------------


def _graph_counts(fact: GraphCounts) -> str:
    listed = [f"rank {rank} {count}" for rank, count in fact.by_rank[:_MOST_LISTED]]
    return f"graphs compiled: {', '.join(listed)}; the others {fact.usual}"


def _pipeline_stages(fact: PipelineStages) -> str:
    stages = "; ".join(ranks_phrase(ranks) for ranks in fact.stages[:_MOST_LISTED])
    more = "; ..." if len(fact.stages) > _MOST_LISTED else ""
    return (
        f"{len(fact.stages)} pipeline stages, which differ by design (first in step"
        f" {fact.step}: {fact.first_event} of {ranks_phrase(fact.first_ranks)}):"
        f" {stages}{more}"
    )


def _event_counts(fact: EventCounts) -> str:
    events = f"{fact.kind} events" + (f" on {fact.group}" if fact.group else "")
    return (
        f"in step {fact.step} {ranks_phrase(fact.minority)} had {fact.minority_events}"
        f" {events}; {ranks_phrase(fact.majority)} had {fact.majority_events}"
    )


def _differing_steps(fact: DifferingSteps) -> str:
    if fact.differing == 1:
        return f"they differ only in this step (1 of {fact.common})"
    return f"they differ in {fact.differing} of {fact.common} steps: {fact.first} to {fact.last}"


def _logs_rejoin(fact: LogsRejoin) -> str:
    extra = [
        f"{plural(count, 'line')} of {ranks_phrase(ranks)}" for count, ranks in fact.extra_lines
    ]
    return f"they agree again after {' and '.join(extra)}"


# -- layouts ---------------------------------------------------------------------------------------


def _stage_modules(fact: StageModules) -> str:
    stages = _on_ranks((_stages_text(stages), ranks) for stages, ranks in fact.ranks)
    return f"each pipeline stage has its own modules: {'; '.join(stages)}"


def _stages_text(stages: tuple[int, ...]) -> str:
    if not stages:
        return "no stage"
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _sibling_groups(fact: SiblingGroups) -> str:
    where = f"along {fact.dim}" if fact.dim else f"of {fact.label}"
    return f"the groups {where} have different ranks: {_few(list(map(group_text, fact.groups)))}"


def _uneven_shards(fact: UnevenShards) -> str:
    parameters = "1 parameter is" if fact.count == 1 else f"{fact.count:,} parameters are"
    how = "sharded as one flat tensor" if fact.is_flat else "not sharded evenly"
    shapes = _on_ranks((list(shape), ranks) for shape, ranks in fact.shapes)
    return f"{parameters} {how}: {fact.example} is {_few(shapes)}"


def _wrong_shard(fact: WrongShard) -> str:
    return (
        f"rank {fact.rank} holds {list(fact.held)} of {fact.param} {list(fact.shape)};"
        f" {', '.join(fact.placements)} gives {list(fact.expected)}"
    )


def _on_ranks(pairs: Iterable[tuple[object, Ranks]]) -> list[str]:
    return [f"{what} on {ranks_phrase(ranks)}" for what, ranks in pairs]


def _few(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _MOST_PARTS} more" if len(texts) > _MOST_PARTS else ""
    return "; ".join(texts[:_MOST_PARTS]) + more


# -- reports ---------------------------------------------------------------------------------------


def _modules_note(fact: ModulesNote) -> str:
    note = ONLY_FORWARD if fact.has_time else NO_TIMES
    if not fact.left_out:
        return note
    return f"{note} {plural(fact.left_out, 'row')} of deeper modules left out."


def _shown_calls(fact: ShownCalls) -> str:
    numbers = f"numbers {fact.first} to {fact.last}"
    of_all = f", the last of {fact.issued}" if fact.first else ""
    arrival = "arrival of the devices" if fact.on_device else "arrival"
    return f"{numbers}{of_all}; {arrival} by {fact.clocks}"


def _differing_call(fact: DifferingCall) -> str:
    return "unknown: overwritten in its ring" if fact.call is None else call_text(fact.call)


# -- dumps -----------------------------------------------------------------------------------------


def _dumps_agree(fact: DumpsAgree) -> str:
    if fact.ranks == 1:
        return "Nothing in the dump is pending."
    return f"The dumps of {fact.ranks} ranks agree, and nothing in them is pending."


def _earlier_mismatch(fact: EarlierMismatch) -> str:
    return (
        f'Earlier, {ranks_phrase(fact.ranks)} differed in #{fact.number} of group "{fact.group}"'
        f" ({', '.join(fact.differs_in)}). All ranks have completed that call and agree since then,"
        " so it does not explain the hang."
    )


def _completed_calls(fact: CompletedCalls) -> str:
    done = "; ".join(
        _on_ranks(
            (f"up to #{number}" if number >= 0 else "nothing", ranks)
            for number, ranks in fact.by_number[:_MOST_PARTS]
        )
    )
    return f'Completed in group "{fact.group}", according to the flight recorder: {done}.'


def _device_states(fact: DeviceStates) -> str:
    states = "; ".join(_on_ranks(fact.by_state))
    return f'According to the flight recorder, #{fact.number} of group "{fact.group}" is {states}.'


SENTENCES: dict[type[Fact], str | Callable[[Any], str]] = {
    # comparisons
    LogsCut: "only the first {fact.lines:,} lines of each log were compared",
    MoreDivergences: "{fact.count:count further divergence} not shown",
    WindowStarts: (
        "compared from step {fact.step}: {fact.ranks:ranks} recorded no earlier step completely"
        " (--records keeps more)"
    ),
    NoCommonStep: (
        "no step is complete on all ranks: only the collectives of each group were compared, by"
        " number (--records keeps more)"
    ),
    NotEnded: (
        "{fact.ranks:ranks} {fact.ranks:has|have} not ended: compared up to"
        " {fact.ranks:its|their} last event"
    ),
    OtherThreads: (
        "left out {fact.events:count event} of other threads, which have no fixed order"
    ),
    GraphCounts: _graph_counts,
    PipelineStages: _pipeline_stages,
    EventCounts: _event_counts,
    DifferingSteps: _differing_steps,
    LogsRejoin: _logs_rejoin,
    LogsStayApart: "they do not agree again in the next {fact.lines} lines",
    # layouts
    LayoutDifference: "{fact.where}: {fact.what} is {fact.here}, elsewhere {fact.there}",
    StageModules: _stage_modules,
    SiblingGroups: _sibling_groups,
    UnevenShards: _uneven_shards,
    NotAMember: (
        "rank {fact.rank} records ranks {fact.group:group} as its group along {fact.along}, but is"
        " not one of them"
    ),
    GroupDisagreement: (
        "along {fact.along} {fact.ranks:ranks} {fact.ranks:records|record} the group"
        " {fact.group:group}, but rank {fact.member} records {fact.group_of_member:group}"
    ),
    LayoutsChanged: (
        "the layout of {fact.ranks:ranks} changed after the first step; this is the last layout"
    ),
    NoLayouts: "no layout of {fact.ranks:ranks}",
    WrongShard: _wrong_shard,
    MoreWrongShards: "other shards differ from their placements too",
    # reports
    EarlierBoxes: (
        "{fact.count:,} {fact.count:box|boxes} of earlier runs or restarts in the same folder:"
        " left out"
    ),
    NoDeviceTimes: (
        "times of the devices: left out, because {fact.ranks:,} ranks are more than {fact.most};"
        " torchwhere phases shows them"
    ),
    NoStepParts: (
        "parts of the steps: left out, because {fact.ranks:,} ranks are more than {fact.most};"
        " torchwhere phases shows them"
    ),
    ModulesNote: _modules_note,
    ShownCalls: _shown_calls,
    DifferingCall: _differing_call,
    ComparedLayouts: "compared on {fact.compared} of {fact.of} ranks",
    MoreLayouts: "{fact.cohorts:count further cohort} with other layouts not shown",
    CohortDiffers: "{fact.ranks:ranks}: {fact.difference}",
    UnusualShard: "unusual: {fact.fact}",
    DiffersByDesign: "differs by design: {fact.fact}",
    LayoutsEqual: "all ranks are laid out alike",
    # dumps
    DumpsAgree: _dumps_agree,
    EarlierMismatch: _earlier_mismatch,
    JobContinued: "The job continued after it: nothing in the dumps is pending.",
    CompletedCalls: _completed_calls,
    DeviceStates: _device_states,
    DevicesBehind: (
        "The {fact.ranks:device|devices} of {fact.ranks:ranks} {fact.ranks:has|have} not reached"
        " it: look at the work queued before it."
    ),
    AllDevicesInCall: "All devices have started it: look at the network between them.",
    GlooLimits: (
        "gloo's recorder keeps no sends and receives, no members of groups and no completion, and"
        " records a reduce_scatter as an all_reduce: faults that show only there stay hidden"
    ),
    NoStacks: "the dumps have no stacks: lines are unknown (JSON dumps never have stacks)",
    OnlyIssuedCalls: (
        "dumps contain the issued collectives, not the current place of a rank; they have no"
        " modules, passes, steps, roots and reduce ops"
    ),
    UnseenHangs: (
        "a hang in a replayed CUDA graph, or of all CPUs outside any collective, leaves nothing"
        " pending in dumps"
    ),
    OnlyActiveCalls: (
        "the {fact.ranks:dump|dumps} of {fact.ranks:ranks} {fact.ranks:lists|list} only what is in"
        " flight: completed calls were not compared"
    ),
    WrappedRings: (
        "the {fact.ranks:ring|rings} of {fact.ranks} {fact.ranks:rank has|ranks have} wrapped:"
        " only calls that all rings still hold were compared"
    ),
    OtherDumps: (
        "left out {fact.count:count other dump} in the folder: older, or with another name"
    ),
    GroupLost: (
        '{fact.ranks:ranks}: the ring no longer holds calls of group "{fact.group}"; it is unknown'
        " whether {fact.ranks:it|they} reached #{fact.number}"
    ),
    MessagesLost: (
        "{fact.ranks:ranks}: the ring has lost the first sends and receives; they were not matched"
    ),
    TooManyDumps: (
        "{fact.count} dumps of the flight recorder in {fact.folder} were not read: pass the folder"
        " with --flight-recorder"
    ),
    DumpCaveat: "flight recorder: {fact.caveat}",
}

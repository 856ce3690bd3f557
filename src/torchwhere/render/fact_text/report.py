"""The sentences of a report."""

from __future__ import annotations

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.core.sanitize import plural
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
from torchwhere.render.fact_text.dispatch import fact_text
from torchwhere.render.verdict_text.phrases import call_text

NO_TIMES = "No times of modules were recorded. To record them: torchwhere run --module-events"
ONLY_FORWARD = (
    "Times are those of forward and recompute calls, on the clock of the CPU: a backward has no"
    " module calls to time."
)


@fact_text.register
def _(fact: EarlierBoxes) -> str:
    boxes = "1 box" if fact.count == 1 else f"{fact.count:,} boxes"
    return f"{boxes} of earlier runs or restarts in the same folder: left out"


@fact_text.register
def _(fact: NoDeviceTimes) -> str:
    return (
        f"times of the devices: left out, because {fact.ranks:,} ranks are more than {fact.most};"
        " torchwhere phases shows them"
    )


@fact_text.register
def _(fact: NoStepParts) -> str:
    return (
        f"parts of the steps: left out, because {fact.ranks:,} ranks are more than {fact.most};"
        " torchwhere phases shows them"
    )


@fact_text.register
def _(fact: ModulesNote) -> str:
    note = ONLY_FORWARD if fact.has_time else NO_TIMES
    if not fact.left_out:
        return note
    return f"{note} {plural(fact.left_out, 'row')} of deeper modules left out."


@fact_text.register
def _(fact: ShownCalls) -> str:
    numbers = f"numbers {fact.first} to {fact.last}"
    of_all = f", the last of {fact.issued}" if fact.first else ""
    arrival = "arrival of the devices" if fact.on_device else "arrival"
    return f"{numbers}{of_all}; {arrival} by {fact.clocks}"


@fact_text.register
def _(fact: DifferingCall) -> str:
    return "unknown: overwritten in its ring" if fact.call is None else call_text(fact.call)


@fact_text.register
def _(fact: ComparedLayouts) -> str:
    return f"compared on {fact.compared} of {fact.of} ranks"


@fact_text.register
def _(fact: MoreLayouts) -> str:
    return f"{plural(fact.cohorts, 'further cohort')} with other layouts not shown"


@fact_text.register
def _(fact: CohortDiffers) -> str:
    return f"{ranks_phrase(fact.ranks)}: {fact.difference}"


@fact_text.register
def _(fact: UnusualShard) -> str:
    return f"unusual: {fact.fact}"


@fact_text.register
def _(fact: DiffersByDesign) -> str:
    return f"differs by design: {fact.fact}"


@fact_text.register
def _(fact: LayoutsEqual) -> str:
    return "all ranks are laid out alike"

"""The sentences about flight recorder dumps. Takes a `DumpFact`, gives one sentence."""

from __future__ import annotations

from functools import singledispatch

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.core.sanitize import plural
from torchwhere.diagnose.dump_facts import (
    AllDevicesInCall,
    AlsoHeld,
    CompletedCalls,
    DevicesBehind,
    DeviceStates,
    DumpFact,
    DumpsAgree,
    GlooLimits,
    GroupLost,
    HeldInCall,
    MessagesLost,
    NoStacks,
    OnlyIssuedCalls,
    OtherDumps,
    TooManyDumps,
    UnrecordedArguments,
    WrappedRings,
)

_MOST_PARTS = 4


@singledispatch
def dump_fact_text(fact: DumpFact) -> str:
    """The sentence of one fact."""
    raise TypeError(f"no sentence for {type(fact).__name__}")


@dump_fact_text.register
def _(fact: DumpsAgree) -> str:
    return f"The dumps of {plural(fact.ranks, 'rank')} agree, and nothing in them is pending."


@dump_fact_text.register
def _(fact: HeldInCall) -> str:
    held = ranks_phrase(fact.ranks).capitalize()
    verb = "is" if len(fact.ranks) == 1 else "are"
    return (
        f'{held} {verb} still in #{fact.number} of group "{fact.group}", which all ranks have'
        f" issued; {ranks_phrase(fact.went_on)} went on. No rank is missing from it."
    )


@dump_fact_text.register
def _(fact: UnrecordedArguments) -> str:
    return (
        "Likely cause: ranks passed different roots or reduce ops, which dumps do not contain; or"
        " the network, or a device."
    )


@dump_fact_text.register
def _(fact: AlsoHeld) -> str:
    return (
        f"{ranks_phrase(fact.ranks).capitalize()} did not arrive either: still in an earlier"
        " collective that all ranks have issued."
    )


@dump_fact_text.register
def _(fact: CompletedCalls) -> str:
    parts = [
        f"{f'up to #{number}' if number >= 0 else 'nothing'} on {ranks_phrase(ranks)}"
        for number, ranks in fact.by_number[:_MOST_PARTS]
    ]
    return f'Completed in group "{fact.group}", by the flight recorder: {"; ".join(parts)}.'


@dump_fact_text.register
def _(fact: DeviceStates) -> str:
    parts = [f"{state} on {ranks_phrase(ranks)}" for state, ranks in fact.by_state]
    return f'By the flight recorder, #{fact.number} of group "{fact.group}" is {"; ".join(parts)}.'


@dump_fact_text.register
def _(fact: DevicesBehind) -> str:
    devices = "device" if len(fact.ranks) == 1 else "devices"
    verb = "has" if len(fact.ranks) == 1 else "have"
    return (
        f"The {devices} of {ranks_phrase(fact.ranks)} {verb} not reached it: look at the work"
        " queued before it."
    )


@dump_fact_text.register
def _(fact: AllDevicesInCall) -> str:
    return "All devices have started it: look at the network between them."


@dump_fact_text.register
def _(fact: GlooLimits) -> str:
    return (
        "gloo's recorder keeps no sends and receives, no members of groups and no completion, and"
        " records a reduce_scatter as an all_reduce: faults that show only there stay hidden"
    )


@dump_fact_text.register
def _(fact: NoStacks) -> str:
    return "the dumps have no stacks: lines are unknown (JSON dumps never have stacks)"


@dump_fact_text.register
def _(fact: OnlyIssuedCalls) -> str:
    return (
        "dumps contain the issued collectives, not the current place of a rank; they have no"
        " modules, passes, steps, roots and reduce ops"
    )


@dump_fact_text.register
def _(fact: WrappedRings) -> str:
    rings = "the ring of 1 rank has" if fact.ranks == 1 else f"the rings of {fact.ranks} ranks have"
    return f"{rings} wrapped: only calls that all rings still hold were compared"


@dump_fact_text.register
def _(fact: OtherDumps) -> str:
    return f"left out {plural(fact.count, 'other dump')} in the folder, older or of another name"


@dump_fact_text.register
def _(fact: GroupLost) -> str:
    it = "it" if len(fact.ranks) == 1 else "they"
    return (
        f'{ranks_phrase(fact.ranks)}: the ring holds nothing of group "{fact.group}" any more;'
        f" whether {it} reached #{fact.number} is unknown"
    )


@dump_fact_text.register
def _(fact: MessagesLost) -> str:
    return (
        f"{ranks_phrase(fact.ranks)}: the ring has lost the first sends and receives; they were not"
        " matched"
    )


@dump_fact_text.register
def _(fact: TooManyDumps) -> str:
    return (
        f"{fact.count} dumps of the flight recorder in {fact.folder} were not read: pass the folder"
        " with --flight-recorder"
    )

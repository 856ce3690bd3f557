"""The sentences about dumps of the flight recorder."""

from __future__ import annotations

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.core.sanitize import plural
from torchwhere.diagnose.dump_facts import (
    AllDevicesInCall,
    CompletedCalls,
    DevicesBehind,
    DeviceStates,
    DumpCaveat,
    DumpsAgree,
    GlooLimits,
    GroupLost,
    MessagesLost,
    NoStacks,
    OnlyActiveCalls,
    OnlyIssuedCalls,
    OtherDumps,
    TooManyDumps,
    UnseenHangs,
    WrappedRings,
)
from torchwhere.render.fact_text.dispatch import fact_text

_MOST_PARTS = 4


@fact_text.register
def _(fact: DumpsAgree) -> str:
    return f"The dumps of {plural(fact.ranks, 'rank')} agree, and nothing in them is pending."


@fact_text.register
def _(fact: CompletedCalls) -> str:
    parts = [
        f"{f'up to #{number}' if number >= 0 else 'nothing'} on {ranks_phrase(ranks)}"
        for number, ranks in fact.by_number[:_MOST_PARTS]
    ]
    done = "; ".join(parts)
    return f'Completed in group "{fact.group}", according to the flight recorder: {done}.'


@fact_text.register
def _(fact: DeviceStates) -> str:
    parts = [f"{state} on {ranks_phrase(ranks)}" for state, ranks in fact.by_state]
    call = f'#{fact.number} of group "{fact.group}"'
    return f"According to the flight recorder, {call} is {'; '.join(parts)}."


@fact_text.register
def _(fact: DevicesBehind) -> str:
    devices = "device" if len(fact.ranks) == 1 else "devices"
    verb = "has" if len(fact.ranks) == 1 else "have"
    return (
        f"The {devices} of {ranks_phrase(fact.ranks)} {verb} not reached it: look at the work"
        " queued before it."
    )


@fact_text.register
def _(fact: AllDevicesInCall) -> str:
    return "All devices have started it: look at the network between them."


@fact_text.register
def _(fact: GlooLimits) -> str:
    return (
        "gloo's recorder keeps no sends and receives, no members of groups and no completion, and"
        " records a reduce_scatter as an all_reduce: faults that show only there stay hidden"
    )


@fact_text.register
def _(fact: NoStacks) -> str:
    return "the dumps have no stacks: lines are unknown (JSON dumps never have stacks)"


@fact_text.register
def _(fact: OnlyIssuedCalls) -> str:
    return (
        "dumps contain the issued collectives, not the current place of a rank; they have no"
        " modules, passes, steps, roots and reduce ops"
    )


@fact_text.register
def _(fact: UnseenHangs) -> str:
    return (
        "a hang in a replayed CUDA graph, or of all CPUs outside any collective, leaves nothing"
        " pending in dumps"
    )


@fact_text.register
def _(fact: OnlyActiveCalls) -> str:
    dumps = "the dump of" if len(fact.ranks) == 1 else "the dumps of"
    lists = "lists" if len(fact.ranks) == 1 else "list"
    return (
        f"{dumps} {ranks_phrase(fact.ranks)} {lists} only what is in flight: completed calls were"
        " not compared"
    )


@fact_text.register
def _(fact: WrappedRings) -> str:
    rings = "the ring of 1 rank has" if fact.ranks == 1 else f"the rings of {fact.ranks} ranks have"
    return f"{rings} wrapped: only calls that all rings still hold were compared"


@fact_text.register
def _(fact: OtherDumps) -> str:
    other = plural(fact.count, "other dump")
    return f"left out {other} in the folder: older, or with another name"


@fact_text.register
def _(fact: GroupLost) -> str:
    it = "it" if len(fact.ranks) == 1 else "they"
    return (
        f'{ranks_phrase(fact.ranks)}: the ring no longer holds calls of group "{fact.group}";'
        f" it is unknown whether {it} reached #{fact.number}"
    )


@fact_text.register
def _(fact: MessagesLost) -> str:
    return (
        f"{ranks_phrase(fact.ranks)}: the ring has lost the first sends and receives; they were not"
        " matched"
    )


@fact_text.register
def _(fact: TooManyDumps) -> str:
    return (
        f"{fact.count} dumps of the flight recorder in {fact.folder} were not read: pass the folder"
        " with --flight-recorder"
    )


@fact_text.register
def _(fact: DumpCaveat) -> str:
    return f"flight recorder: {fact.caveat}"

"""Finds which ranks issued the calls of several groups in a different order from the others.

Takes calls that wait for each other in a cycle, gives the ranks in each of them. Only ranks that
take part in all of these calls chose the order: the fewest of them are wrong. If one rank stands
against one, the ranks of the other groups decide: before the same call of the common group, a
correct rank has issued as many calls of its smaller groups as they have of theirs.

Limit: the others decide only if most of them agree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torchwhere.core.grouping import grouped
from torchwhere.core.rank_text import Ranks
from torchwhere.diagnose.call_graph import CallGraph, Root
from torchwhere.diagnose.dump_progress import Meeting


@dataclass(frozen=True, slots=True)
class OrderSide:
    """The ranks of a cycle that issued one of its calls first."""

    meeting: Meeting
    ranks: Ranks
    in_all: Ranks  # those that take part in all calls of the cycle: only they chose the order


def order_sides(graph: CallGraph, root: Root) -> tuple[list[OrderSide], bool]:
    """The sides of a cycle, the wrong one second, and whether it is clear which one is wrong."""
    members = [set(graph.progress.taking_part(graph.call(meeting))) for meeting in root]
    in_all = set.intersection(*members)
    by_first = grouped(
        (_first(graph, rank, root), rank)
        for rank in sorted({rank for meeting in root for rank in graph.ranks_in[meeting]})
    )
    sides = [
        OrderSide(meeting, tuple(ranks), tuple(filter(in_all.__contains__, ranks)))
        for meeting, ranks in sorted(by_first.items())
    ]
    sides.sort(key=lambda side: len(side.in_all), reverse=True)
    if len(sides) != 2 or not sides[1].in_all:
        return sides, False
    usual, other = sides
    if len(usual.in_all) > len(other.in_all):
        return sides, True
    wrong = _outvoted(graph, usual, other)
    return [usual, other] if wrong is not usual else [other, usual], wrong is not None


def _first(graph: CallGraph, rank: int, root: Root) -> Meeting:
    """The call of a cycle that a rank issued before the others; with timing, the one it is in."""
    place = graph.places[rank].meeting
    if graph.ranks[rank].has_timing:
        return place
    return next(meeting for meeting in graph.ranks[rank].first_pending if meeting in root)


def shift(graph: CallGraph, usual: OrderSide, other: OrderSide) -> int:
    """How many calls of the usual side's group the other side has skipped, in the end.

    Compares one rank of each side at the last call of the other side's group that both have
    issued. 0: the ranks only swapped two calls, or it is unknown.
    """
    rank, witness = other.in_all[0], usual.in_all[0]
    own, theirs = other.meeting[0], usual.meeting[0]
    records, other_records = _records(graph, rank, own), _records(graph, witness, own)
    last = max(records.keys() & other_records.keys(), default=0)
    are_collectives = usual.meeting[2] < 0 and other.meeting[2] < 0
    if not are_collectives or last <= _first_number(graph, rank, own):
        return 0
    return _issued_before(graph, witness, theirs, other_records[last]) - _issued_before(
        graph, rank, theirs, records[last]
    )


def _outvoted(graph: CallGraph, one: OrderSide, other: OrderSide) -> OrderSide | None:
    """Of two sides of equal size, the one that the ranks of other groups contradict."""
    if one.meeting[2] >= 0 or other.meeting[2] >= 0:
        return None
    for shared, own in ((one, other), (other, one)):
        here, there = shared.in_all[0], own.in_all[0]
        counts = [_calls_before(graph, rank, shared, own) for rank in (here, there)]
        usual = _usual(graph, shared, own)
        if None not in counts and counts[0] != counts[1] and usual in counts:
            return own if usual == counts[0] else shared
    return None


def _usual(graph: CallGraph, shared: OrderSide, own: OrderSide) -> int | None:
    """What most ranks that are only in the shared call have issued before it."""
    counts = Counter(
        count
        for rank in graph.progress.taking_part(graph.call(shared.meeting))
        if rank not in (*shared.in_all, *own.in_all) and rank in graph.ranks
        if (count := _calls_before(graph, rank, shared, own)) is not None
    )
    usual, votes = max(counts.items(), key=lambda item: item[1], default=(None, 0))
    return usual if 2 * votes > counts.total() else None


def _calls_before(graph: CallGraph, rank: int, shared: OrderSide, own: OrderSide) -> int | None:
    """How many calls a rank had issued before the shared call, in its groups of the same size as
    the other side's group; None if unknown."""
    record = _records(graph, rank, shared.meeting[0]).get(shared.meeting[1])
    members = graph.progress.members
    if record is None:
        return None
    return sum(
        _issued_before(graph, rank, name, record)
        for name in graph.ranks[rank].issued
        if len(members[name]) == len(members[own.meeting[0]]) and name != shared.meeting[0]
    )


def _first_number(graph: CallGraph, rank: int, group: str) -> int:
    return min(_records(graph, rank, group), default=0)


def _records(graph: CallGraph, rank: int, group: str) -> dict[int, int]:
    """The records of a rank's pending collectives in a group, by their number."""
    calls = graph.ranks[rank].pending
    return {call.number: call.record for call in calls if (call.group, call.ends) == (group, None)}


def _issued_before(graph: CallGraph, rank: int, group: str, record: int) -> int:
    """How many collectives of a group a rank had issued before a record."""
    records = _records(graph, rank, group)
    before = [number + 1 for number in records if records[number] < record]
    issued = graph.ranks[rank].issued.get(group, 0)
    return max(before, default=min(records, default=issued))

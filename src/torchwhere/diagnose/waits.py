"""Who waits for whom: the collectives that some ranks issued and others did not.

Takes a hearing, gives for each rank the call it must be stuck in, if there is one, and who has yet to come. A rank that others
wait for and that waits for nobody is where the trouble is; ranks that wait for each other in a circle are a deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torchwhere.diagnose.testimony import Hearing, StreamKey, Testimony


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that issued a collective which is not complete."""

    rank: int
    key: StreamKey
    number: int
    missing: tuple[int, ...]  # who has not issued it, by their own boxes
    unheard: tuple[int, ...]  # members without a box: nobody knows


def members(hearing: Hearing, key: StreamKey) -> tuple[int, ...]:
    """Who takes part: the ranks of the group, or sender and receiver. A message from anybody has no known sender."""
    if key.source == key.destination == -1:
        return hearing.group(key).ranks
    return tuple(rank for rank in (key.source, key.destination) if rank >= 0)


def waits(hearing: Hearing) -> dict[int, Wait]:
    """For each rank that has one, the incomplete call it must be in."""
    streams = {key for testimony in hearing.testimonies.values() for key in testimony.counts}
    found: defaultdict[int, list[Wait]] = defaultdict(list)
    for key in streams:
        for wait in _incomplete(hearing, key):
            found[wait.rank].append(wait)
    return {rank: _blocking(hearing.testimonies[rank], candidates) for rank, candidates in found.items()}


def _incomplete(hearing: Hearing, key: StreamKey) -> list[Wait]:
    """Of each rank, its first call in this stream that somebody has not issued."""
    taking_part = members(hearing, key)
    if len(taking_part) < 2:
        return []
    heard = [rank for rank in taking_part if rank in hearing.testimonies]
    unheard = tuple(rank for rank in taking_part if rank not in hearing.testimonies)
    counts = {rank: hearing.testimonies[rank].counts.get(key, 0) for rank in heard}
    lowest = min(counts.values(), default=0)
    behind = tuple(rank for rank in heard if counts[rank] == lowest)
    return [Wait(rank, key, lowest, behind, unheard) for rank in heard if counts[rank] > lowest]


def _blocking(testimony: Testimony, candidates: list[Wait]) -> Wait:
    """The call a rank is in. One that returns only when it is done was the last it issued; of those that return at once, the
    first that is not done is what it waits for sooner or later."""
    in_order = sorted(candidates, key=lambda wait: testimony.order(wait.key, wait.number))
    last = testimony.issued(in_order[-1].key, in_order[-1].number)
    return in_order[-1] if last is not None and not last.fields.get("async") else in_order[0]


def awaited(found: dict[int, Wait]) -> list[int]:
    """The ranks that others wait for and that wait for nobody themselves: where the trouble is."""
    return sorted({rank for wait in found.values() for rank in wait.missing if rank not in found})


def circle(found: dict[int, Wait]) -> list[Wait]:
    """Ranks that wait for each other, in order, the last one for the first; empty where there is no such circle."""
    for start in sorted(found):
        path: list[int] = []
        rank = start
        while rank in found and rank not in path:
            path.append(rank)
            rank = next((other for other in found[rank].missing if other in found), -1)
        if rank in path:
            return [found[member] for member in path[path.index(rank) :]]
    return []


def wrong_peers(hearing: Hearing, found: list[Wait]) -> list[Wait]:
    """Of ranks that wait in a circle, those that listen to one rank while another one has written to them, or that write to one
    while another one listens. Outside a circle that means nothing: mail may lie unread for a while."""
    return [wait for wait in found if wait.key.source != wait.key.destination and _is_expected_elsewhere(hearing, wait)]


def _is_expected_elsewhere(hearing: Hearing, wait: Wait) -> bool:
    key, rank = wait.key, wait.rank
    is_receiver = key.destination == rank
    for other, testimony in hearing.testimonies.items():
        if other in (rank, key.source, key.destination):
            continue
        stream = StreamKey(key.group, other, rank) if is_receiver else StreamKey(key.group, rank, other)
        if testimony.counts.get(stream, 0) > hearing.testimonies[rank].counts.get(stream, 0):
            return True
    return False

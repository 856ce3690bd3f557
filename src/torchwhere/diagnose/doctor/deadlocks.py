"""Finds the culprits of a deadlock: ranks that wait for each other, of which at least one deviated
from its call pattern.

Takes a cycle of waits, gives the culprits and the certainty. If rank X waits for rank Y in a
stream, either Y skipped a call of it, or X issued one too many: each is checked for a deviation
from its own pattern (`call_patterns.py`) in that stream since the two last agreed. What most
members of a stream do for the first time together is not a deviation. Ranks that follow their
patterns cannot deadlock, so a rank of the cycle deviated; if the boxes do not show which, the
verdict says so and names no rank for certain. A rank of the cycle that ranks with the same program
contradict (`majority.py`) is the culprit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.core.place import Certainty
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.call_patterns import Call, Deviation, Patterns
from torchwhere.diagnose.doctor.finding import exact_if
from torchwhere.diagnose.doctor.majority import Majority
from torchwhere.diagnose.doctor.waits import Wait, links, missing_once

_ASKED = 16  # members of a group that are checked for the same deviation
_COMPANIONS = 64  # ranks that wait in the same call
_SURE_ROUNDS = 3
_NEIGHBOURS = 32  # ranks whose peers on the same line are compared


@dataclass(frozen=True, slots=True)
class Blame:
    """The culprits of a cycle, and the evidence."""

    culprits: tuple[int, ...] = ()
    deviations: tuple[Deviation, ...] = ()  # of the culprits
    is_sure: bool = False
    has_wrong_peer: bool = False  # each of them used another peer than usual
    have_stayed: bool = False  # they did not follow where most of a group went
    is_outvoted: bool = False  # most ranks with the same earlier calls took a different path

    @property
    def certainty(self) -> Certainty:
        return exact_if(self.is_sure)


class _Sign(NamedTuple):
    """A deviation that explains a wait of the cycle: one rank skipped the awaited call, or the
    other issued one too many."""

    deviation: Deviation
    left_out: StreamKey | None


def blame(
    job_calls: JobCalls,
    cycle: list[Wait],
    waits: Mapping[int, Wait],
    *,
    unread: Collection[int] = (),
) -> Blame:
    """The culprits of a cycle; the last wait is for the first rank.

    `waits` are all waits of the job. The last calls of `unread` ranks are unknown.
    """
    patterns = Patterns(job_calls, ranks=len(cycle))
    signs = [sign for wait, other in links(cycle) for sign in _signs(patterns, wait, other.rank)]
    majority = Majority(job_calls, patterns.roles, ranks=[wait.rank for wait in cycle])
    outvoted = frozenset(majority.outvoted(cycle))
    is_outvoted = 0 < len(outvoted) < len(cycle)
    if is_outvoted:
        deviated = {sign.deviation for sign in signs if sign.deviation.rank in outvoted}
    else:
        deviated = {sign.deviation for sign in signs if not _is_shared(patterns, sign)}
    own = sorted(deviated, key=lambda deviation: (deviation.rank, deviation.record))
    culprits = outvoted if is_outvoted else frozenset(deviation.rank for deviation in own)
    # what more than half of them did is part of the program
    if 0 < 2 * len(culprits) <= len(cycle):
        blamed = _blame_deviations(patterns, cycle, waits, culprits, own)
        return replace(blamed, is_outvoted=is_outvoted)
    if any(wait.rank in unread for wait in cycle):
        return Blame()
    stayed = {rank for sign in signs for rank in _stayed(patterns, sign, cycle)}
    if 0 < len(stayed) < len(cycle):
        return Blame(tuple(sorted(stayed)), have_stayed=True)
    strays = _out_of_line(job_calls, cycle)
    return Blame(strays, has_wrong_peer=True) if strays else Blame(_fewest(job_calls, cycle, waits))


def _blame_deviations(
    patterns: Patterns,
    cycle: list[Wait],
    waits: Mapping[int, Wait],
    culprits: frozenset[int],
    own: list[Deviation],
) -> Blame:
    """Blame the ranks of a cycle that deviated, and those that came there by the same deviation."""
    others = {
        other for rank in culprits for other in _companions(patterns, own, waits[rank], waits)
    }
    changes_only_peer = bool(own) and all(
        _changes_only_peer(patterns.job_calls, deviation) for deviation in own
    )
    have_all_deviated = {deviation.rank for deviation in own} == culprits
    is_sure = _is_sure(patterns, cycle, own, changes_only_peer=changes_only_peer)
    return Blame(
        tuple(sorted(culprits | others)),
        tuple(own),
        is_sure=have_all_deviated and is_sure,
        has_wrong_peer=changes_only_peer,
    )


def has_skipped(patterns: Patterns, rank: int, wait: Wait) -> bool:
    """Whether a rank skipped, against its usual pattern, what another rank waits for."""
    return any(
        sign.deviation.rank == rank and not _is_shared(patterns, sign)
        for sign in _signs(patterns, wait, rank)
    )


def switched_peer(patterns: Patterns, wait: Wait) -> bool:
    """Whether a waiting rank uses another peer than it always used on that line."""
    return any(
        deviation.issued == wait.call and _changes_only_peer(patterns.job_calls, deviation)
        for deviation in patterns.of(wait.rank).deviations
    )


# -- links -----------------------------------------------------------------------------------------


def _signs(patterns: Patterns, wait: Wait, other: int) -> Iterator[_Sign]:
    """Deviations of a waiting rank, or of the awaited one, in the stream of the wait."""
    since, others_since = _last_agreed(patterns.job_calls, wait.key, wait.rank, other)
    for deviation in patterns.of(wait.rank).deviations:
        if deviation.issued[0] == wait.key and deviation.record > since:
            yield _Sign(deviation, left_out=None)
    for deviation in patterns.of(other).deviations:
        if _left_out(deviation, wait.key) and deviation.record > others_since:
            yield _Sign(deviation, left_out=wait.key)


def _left_out(deviation: Deviation, key: StreamKey) -> set[Call]:
    """The calls of a stream that a rank should have issued and did not. One that it issued at
    another line is not left out."""
    return {call for call in deviation.due if call[0] == key} - {deviation.issued}


def _is_shared(patterns: Patterns, sign: _Sign) -> bool:
    """Whether most of the others made the same deviation: then it is part of the program."""
    deviation = sign.deviation
    if _most(patterns, _alike(patterns, deviation), lambda other: other.issued == deviation.issued):
        return True
    if sign.left_out is None:
        return False
    key, due = sign.left_out, _left_out(deviation, sign.left_out)
    return _most(
        patterns,
        _others(patterns.job_calls, key, deviation.rank),
        lambda other: not due.isdisjoint(_left_out(other, key)),
    )


def _alike(patterns: Patterns, deviation: Deviation) -> list[int]:
    """Ranks that could have made the same deviation: members of the stream it continued with, with
    the role that it left.

    A rank without that role continues in any case, which proves nothing.
    """
    others = _others(patterns.job_calls, deviation.issued[0], deviation.rank)
    left = patterns.roles.of(deviation.rank, deviation.like[0])
    if left.direction:
        return others
    return [rank for rank in others if patterns.roles.takes_part(rank, left)]


def _most(patterns: Patterns, ranks: list[int], did: Callable[[Deviation], bool]) -> bool:
    return 2 * sum(any(map(did, patterns.of(rank).deviations)) for rank in ranks) > len(ranks)


def _companions(
    patterns: Patterns, own: list[Deviation], wait: Wait, waits: Mapping[int, Wait]
) -> list[int]:
    """Awaited ranks that wait in the same call as a culprit and came there by the same
    deviation."""
    issued = {deviation.issued for deviation in own if deviation.rank == wait.rank}
    missing = set().union(*missing_once(waits))
    together = [
        rank for rank, other in waits.items() if other.call == wait.call and rank in missing
    ]
    return [
        rank
        for rank in together[:_COMPANIONS]
        if any(deviation.issued in issued for deviation in patterns.of(rank).deviations)
    ]


def _last_agreed(job_calls: JobCalls, key: StreamKey, rank: int, other: int) -> tuple[int, int]:
    """The records, on two ranks, of the last common call at which their counts in a stream had the
    usual difference: the deviation came later.

    -1 if there is no such call.
    """
    ranks = [job_calls.by_rank[member] for member in (rank, other)]
    latest = -1, -1
    for common in ranks[0].calls.keys() & ranks[1].calls.keys():
        if common == key or common.is_p2p:
            continue
        calls = [rank_calls.calls[common] for rank_calls in ranks]
        first = max(stream.first for stream in calls)
        last = min(stream.last for stream in calls)
        if first > last:
            continue
        records = [
            stream.records()[first - stream.first : last + 1 - stream.first] for stream in calls
        ]
        ahead = np.subtract(*map(partial(_issued_before, key), ranks, records))
        at = int(np.flatnonzero(ahead == ahead[0])[-1])
        latest = max(latest, (int(records[0][at]), int(records[1][at])))
    return latest


def _issued_before(
    key: StreamKey, rank_calls: RankCalls, records: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """How many calls of a stream a rank had issued at each of these records."""
    calls = rank_calls.calls.get(key)
    if calls is None:
        return np.full(len(records), rank_calls.counts.get(key, 0), np.int64)
    return calls.first + np.searchsorted(calls.records(), records)


def _others(job_calls: JobCalls, key: StreamKey, rank: int) -> list[int]:
    """A sample of the other members of a stream that have data."""
    others = [
        member
        for member in job_calls.members(key)
        if member != rank and member in job_calls.by_rank
    ]
    return others[:: max(1, len(others) // _ASKED)][:_ASKED]


# -- where patterns do not decide ------------------------------------------------------------------


def _fewest(job_calls: JobCalls, cycle: list[Wait], waits: Mapping[int, Wait]) -> tuple[int, ...]:
    """For a cycle over collectives, the ranks in the collective with the fewest waiting ranks.

    Only ranks that take part in all of them count: the others have no choice. A message has one
    rank on each side, which proves nothing: both ranks of a cycle of two are named, and no rank of
    a longer one, nor of two sides with several ranks each.
    """
    by_call: dict[Call, list[int]] = {wait.call: [] for wait in cycle}
    in_all = frozenset.intersection(*(frozenset(job_calls.members(key)) for key, _ in by_call))
    for rank, wait in waits.items():
        if wait.call in by_call and rank in in_all:
            by_call[wait.call].append(rank)
    sizes = sorted(by_call.values(), key=len)
    is_of_groups = not any(key.is_p2p for key, _ in by_call)
    if is_of_groups and 0 < len(sizes[0]) < len(sizes[-1]):
        return tuple(
            sorted(rank for ranks in sizes if len(ranks) == len(sizes[0]) for rank in ranks)
        )
    is_pair = len(cycle) == 2 and len(sizes[-1]) < 2
    return tuple(sorted(wait.rank for wait in cycle)) if is_pair else ()


def _is_sure(
    patterns: Patterns, cycle: list[Wait], own: list[Deviation], *, changes_only_peer: bool
) -> bool:
    """Whether the culprits left a well-known round for another part of it, and all others are where
    their patterns predict.

    A rank that continues with something new may be right, and the others wrong to stay.
    """
    blamed = {deviation.rank for deviation in own}
    is_clear = all(
        deviation.rounds >= _SURE_ROUNDS and (not deviation.is_new or changes_only_peer)
        for deviation in own
    )
    return is_clear and all(
        wait.call in patterns.of(wait.rank).expected for wait in cycle if wait.rank not in blamed
    )


def _stayed(patterns: Patterns, sign: _Sign, cycle: list[Wait]) -> list[int]:
    """Ranks of the cycle that did not follow where most of their group went."""
    if not _is_shared(patterns, sign):
        return []
    (key, number), job_calls = sign.deviation.issued, patterns.job_calls
    ranks = {wait.rank for wait in cycle}.intersection(job_calls.members(key))
    return [rank for rank in ranks if job_calls.by_rank[rank].counts.get(key, 0) <= number]


# -- wrong peers -----------------------------------------------------------------------------------


def _changes_only_peer(job_calls: JobCalls, deviation: Deviation) -> bool:
    """Whether a deviation changes only the peer: same line, same direction, another rank."""
    rank_calls = job_calls.by_rank[deviation.rank]
    due, issued = deviation.like[0], deviation.issued[0]
    is_same_way = due.group == issued.group and (due.source == issued.source) != (
        due.destination == issued.destination
    )
    places = rank_calls.place_of(*deviation.like), rank_calls.place_of(*deviation.issued)
    lines = {place.full_line if place is not None else None for place in places}
    return is_same_way and due.is_p2p and len(lines) == 1 and deviation.is_new


def _out_of_line(job_calls: JobCalls, cycle: list[Wait]) -> tuple[int, ...]:
    """Ranks that wait for a first message with a peer at another distance than all others use on
    that line."""
    first = [wait for wait in cycle if wait.key.is_p2p and wait.number == 0]
    strays = tuple(wait.rank for wait in first if _is_out_of_line(job_calls, wait))
    return strays if len(strays) < len(cycle) else ()


def _is_out_of_line(job_calls: JobCalls, wait: Wait) -> bool:
    ranks = job_calls.group(wait.key).ranks or tuple(sorted(job_calls.by_rank))
    mine = _peer_offset(job_calls, wait.rank, wait.key, ranks)
    if mine is None or wait.rank not in ranks:
        return False
    at = ranks.index(wait.rank)
    near = ranks[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]
    offsets = [
        offset
        for rank in near
        if rank != wait.rank and rank in job_calls.by_rank
        for key in job_calls.by_rank[rank].calls
        if (offset := _peer_offset(job_calls, rank, key, ranks)) is not None
        and offset[:-1] == mine[:-1]
    ]
    return len(offsets) > 1 and len(set(offsets)) == 1 and offsets[0] != mine


def _peer_offset(
    job_calls: JobCalls, rank: int, key: StreamKey, ranks: tuple[int, ...]
) -> tuple[int, bool, str, int] | None:
    """Group, direction, line and peer distance of the last message of a stream."""
    calls = job_calls.by_rank[rank].calls.get(key)
    peer = key.destination if key.source == rank else key.source
    if calls is None or not key.is_p2p or rank not in ranks or peer not in ranks:
        return None
    line = calls.of(calls.last)[1].site_id[2]
    distance = (ranks.index(peer) - ranks.index(rank)) % len(ranks)
    return (key.group, key.source == rank, line, distance) if line else None

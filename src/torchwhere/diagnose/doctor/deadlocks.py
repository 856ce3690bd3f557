"""Who is to blame for a circle: ranks that wait for each other, of which at least one did not do
what it always did.

Takes a circle of waits, gives the ranks to blame and how sure that is. Where rank X waits for rank
Y in a stream, either Y left a call of it out, or X issued one too many: each is asked whether it
departed from its own habit (`habits.py`) in just that, since the two last agreed. What most members
of a stream do for the first time together is no departure. Ranks that do as they always did cannot
wait for each other in a circle, so somebody in it departed; where the boxes do not show who, that
is said, and nobody is named for sure. Where ranks with the same program contradict one of the
circle (`majority.py`), it is that one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.core.place import Certainty
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import JobCalls, RankCalls
from torchwhere.diagnose.doctor.call_patterns import Deviation, Patterns
from torchwhere.diagnose.doctor.majority import Majority
from torchwhere.diagnose.doctor.roles import roles_of
from torchwhere.diagnose.doctor.waits import Wait, members

_ASKED = 16  # members of a group, whether they did the same
_COMPANIONS = 64  # ranks that wait in the same call
_SURE_ROUNDS = 3
_NEIGHBOURS = 32  # ranks whose peers on the same line are looked at


@dataclass(frozen=True, slots=True)
class Blame:
    """Who broke the circle, by what is known."""

    culprits: tuple[int, ...] = ()
    deviations: tuple[Deviation, ...] = ()  # of the culprits
    is_sure: bool = False
    has_wrong_peer: bool = False  # each of them turned to another rank than it was to
    have_stayed: bool = False  # they did not come along where most of a group went
    is_outvoted: bool = False  # most ranks with the same calls before went another way

    @property
    def certainty(self) -> Certainty:
        return Certainty.EXACT if self.is_sure else Certainty.INFERRED


class _Sign(NamedTuple):
    """A departure that explains a link of a circle: what is waited in was left out by one, or is
    one too many of the other."""

    deviation: Deviation
    left_out: StreamKey | None


def blame(
    job_calls: JobCalls,
    found: list[Wait],
    waits: Mapping[int, Wait],
    *,
    unread: Collection[int] = (),
) -> Blame:
    """Of ranks that wait for each other, in order, the last one for the first; `waits` are all
    there are, and of `unread` ranks it is not known what they did last."""
    patterns = Patterns(job_calls, ranks=len(found))
    links = zip(found, [*found[1:], *found[:1]], strict=True)
    signs = [
        sign for wait, other in links for sign in _signs(job_calls, patterns, wait, other.rank)
    ]
    outvoted = frozenset(Majority(job_calls, ranks=[wait.rank for wait in found]).outvoted(found))
    has_majority = 0 < len(outvoted) < len(found)
    if has_majority:
        deviated = {sign.deviation for sign in signs if sign.deviation.rank in outvoted}
    else:
        deviated = {sign.deviation for sign in signs if not _is_shared(job_calls, patterns, sign)}
    own = sorted(deviated, key=lambda deviation: (deviation.rank, deviation.record))
    culprits = outvoted if has_majority else frozenset(deviation.rank for deviation in own)
    if 0 < len(culprits) < len(found):
        others = {
            rank for rank in culprits for rank in _companions(patterns, own, waits[rank], waits)
        }
        is_to_another = bool(own) and all(
            _is_to_another(job_calls.by_rank[each.rank], each) for each in own
        )
        is_sure = {each.rank for each in own} == culprits and _is_sure(
            patterns, found, own, is_to_another=is_to_another
        )
        return Blame(
            tuple(sorted(culprits | others)),
            tuple(own),
            is_sure,
            is_to_another,
            is_outvoted=has_majority,
        )
    if any(wait.rank in unread for wait in found):
        return Blame()
    stayed = {rank for sign in signs for rank in _stayed(job_calls, patterns, sign, found)}
    if 0 < len(stayed) < len(found):
        return Blame(tuple(sorted(stayed)), have_stayed=True)
    strays = _out_of_line(job_calls, found)
    return Blame(strays, has_wrong_peer=True) if strays else Blame(_fewest(job_calls, found, waits))


def has_left_out(job_calls: JobCalls, patterns: Patterns, rank: int, wait: Wait) -> bool:
    """Whether a rank has left out, against its habit, what another one waits for."""
    return any(
        sign.deviation.rank == rank and not _is_shared(job_calls, patterns, sign)
        for sign in _signs(job_calls, patterns, wait, rank)
    )


def turns_away(job_calls: JobCalls, patterns: Patterns, wait: Wait) -> bool:
    """Whether a rank that waits turned, against its habit, to another one than on that line it
    always did."""
    said, call = job_calls.by_rank[wait.rank], (wait.key, wait.number)
    return any(
        each.issued == call and _is_to_another(said, each)
        for each in patterns.of(wait.rank).deviations
    )


# -- links -----------------------------------------------------------------------------------------


def _signs(job_calls: JobCalls, patterns: Patterns, wait: Wait, other: int) -> Iterator[_Sign]:
    """Of a rank that waits and the one it waits for: where one of them changed how often it issues
    what is waited in."""
    since, others_since = _last_agreed(job_calls, wait.key, wait.rank, other)
    for each in patterns.of(wait.rank).deviations:
        if each.issued[0] == wait.key and each.record > since:
            yield _Sign(each, left_out=None)
    for each in patterns.of(other).deviations:
        if any(key == wait.key for key, _ in each.due) and each.record > others_since:
            yield _Sign(each, left_out=wait.key)


def _is_shared(job_calls: JobCalls, patterns: Patterns, sign: _Sign) -> bool:
    """Whether most of the others went on to the same thing too, or left the same out: then it is
    the program that does."""
    key, number = sign.deviation.issued
    went_on = _most(
        patterns, _alike(job_calls, sign.deviation), lambda each: each.issued == (key, number)
    )
    if went_on or sign.left_out is None:
        return went_on
    due = {call for call in sign.deviation.due if call[0] == sign.left_out}
    return _most(
        patterns,
        _others(job_calls, sign.left_out, sign.deviation.rank),
        lambda each: not due.isdisjoint(each.due),
    )


def _alike(job_calls: JobCalls, deviation: Deviation) -> list[int]:
    """Ranks that could have gone on as a rank did: members of the stream it went to, with the role
    that it left. A rank without that role goes on in any case, which says nothing."""
    roles, others = roles_of(job_calls), _others(job_calls, deviation.issued[0], deviation.rank)
    left = roles.of(deviation.rank, deviation.like[0])
    return [rank for rank in others if left.direction or roles.takes_part(rank, left)]


def _most(patterns: Patterns, ranks: list[int], did: Callable[[Deviation], bool]) -> bool:
    return 2 * sum(any(map(did, patterns.of(rank).deviations)) for rank in ranks) > len(ranks)


def _companions(
    patterns: Patterns, own: list[Deviation], wait: Wait, waits: Mapping[int, Wait]
) -> list[int]:
    """Ranks that wait in the same call as a culprit, came there by the same departure, and are
    waited for elsewhere too."""
    issued = {deviation.issued for deviation in own if deviation.rank == wait.rank}
    missing = {
        rank
        for ranks in {id(each.missing): each.missing for each in waits.values()}.values()
        for rank in ranks
    }
    together = [
        rank
        for rank, each in waits.items()
        if (each.key, each.number) == (wait.key, wait.number) and rank in missing
    ]
    return [
        rank
        for rank in together[:_COMPANIONS]
        if any(each.issued in issued for each in patterns.of(rank).deviations)
    ]


def _last_agreed(job_calls: JobCalls, key: StreamKey, one: int, other: int) -> tuple[int, int]:
    """When, on each of two ranks, they last came to the same call of a group with as many calls of
    a stream behind them, or as far apart as ever: what parted them came after it. -1 where there is
    no such call."""
    said = [job_calls.by_rank[rank] for rank in (one, other)]
    latest = -1, -1
    for mark in said[0].calls.keys() & said[1].calls.keys():
        if mark == key or mark.source != mark.destination:
            continue
        calls = [each.calls[mark] for each in said]
        first, last = max(each.first for each in calls), min(each.last for each in calls)
        if first > last:
            continue
        records = [each.records()[first - each.first : last + 1 - each.first] for each in calls]
        ahead = np.subtract(
            *(_issued_before(each, key, when) for each, when in zip(said, records, strict=True))
        )
        at = int(np.flatnonzero(ahead == ahead[0])[-1])
        latest = max(latest, (int(records[0][at]), int(records[1][at])))
    return latest


def _issued_before(
    said: RankCalls, key: StreamKey, records: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """How many calls of a stream a rank had issued at each of these records."""
    calls = said.calls.get(key)
    if calls is None:
        return np.full(len(records), said.counts.get(key, 0), np.int64)
    return calls.first + np.searchsorted(calls.records(), records)


def _others(job_calls: JobCalls, key: StreamKey, rank: int) -> list[int]:
    """Some of the other members of a stream that were heard, spread over all."""
    others = [
        member
        for member in members(job_calls, key)
        if member != rank and member in job_calls.by_rank
    ]
    return others[:: max(1, len(others) // _ASKED)][:_ASKED]


# -- where habits do not tell ----------------------------------------------------------------------


def _fewest(job_calls: JobCalls, found: list[Wait], waits: Mapping[int, Wait]) -> tuple[int, ...]:
    """Where a circle is over collectives of groups, those in the one of them that the fewest are
    in. Only ranks that take part in all of them count: another rank has no choice. A message has
    one rank on each side, which says nothing: of a circle of two it is one of both, and of a larger
    one nobody is named."""
    by_call: dict[tuple[StreamKey, int], list[int]] = {
        (wait.key, wait.number): [] for wait in found
    }
    in_all = frozenset.intersection(*(frozenset(members(job_calls, key)) for key, _ in by_call))
    for rank, wait in waits.items():
        if (wait.key, wait.number) in by_call and rank in in_all:
            by_call[wait.key, wait.number].append(rank)
    sizes = sorted(by_call.values(), key=len)
    is_of_groups = all(key.source == key.destination for key, _ in by_call)
    if is_of_groups and 0 < len(sizes[0]) < len(sizes[-1]):
        return tuple(
            sorted(rank for ranks in sizes if len(ranks) == len(sizes[0]) for rank in ranks)
        )
    return tuple(sorted(wait.rank for wait in found)) if len(found) == 2 else ()


def _is_sure(
    patterns: Patterns, found: list[Wait], own: list[Deviation], *, is_to_another: bool
) -> bool:
    """Whether the culprits left a round that they had gone through again and again for something
    else of it, and all others stand where they were to come. A program that goes on to something
    new may be right, and the others wrong to stay."""
    blamed = {deviation.rank for deviation in own}
    is_clear = all(
        each.rounds >= _SURE_ROUNDS and (not each.is_new or is_to_another) for each in own
    )
    return is_clear and all(
        (wait.key, wait.number) in patterns.of(wait.rank).expected
        for wait in found
        if wait.rank not in blamed
    )


def _stayed(job_calls: JobCalls, patterns: Patterns, sign: _Sign, found: list[Wait]) -> list[int]:
    """Of a circle, the members of a group that did not come along where most of it went."""
    if not _is_shared(job_calls, patterns, sign):
        return []
    key, number = sign.deviation.issued
    taking_part = frozenset(members(job_calls, key))
    ranks = [wait.rank for wait in found if wait.rank in taking_part]
    return [rank for rank in ranks if job_calls.by_rank[rank].counts.get(key, 0) <= number]


# -- wrong peers -----------------------------------------------------------------------------------


def _is_to_another(said: RankCalls, deviation: Deviation) -> bool:
    """Whether all that a rank did otherwise is to whom it turned: the same line, the same
    direction, another rank."""
    due, issued = deviation.like[0], deviation.issued[0]
    is_same_way = due.group == issued.group and (due.source == issued.source) != (
        due.destination == issued.destination
    )
    places = said.place_of(*deviation.like), said.place_of(*deviation.issued)
    lines = {place.line if place is not None else None for place in places}
    return is_same_way and due.source != due.destination and len(lines) == 1 and deviation.is_new


def _out_of_line(job_calls: JobCalls, found: list[Wait]) -> tuple[int, ...]:
    """Of ranks that wait for the first message with somebody: those whose peer is not as far from
    them as on that line the peers of all others are from theirs."""
    first = [wait for wait in found if wait.key.source != wait.key.destination and wait.number == 0]
    strays = tuple(wait.rank for wait in first if _is_out_of_line(job_calls, wait))
    return strays if len(strays) < len(found) else ()


def _is_out_of_line(job_calls: JobCalls, wait: Wait) -> bool:
    ranks = job_calls.group(wait.key).ranks or tuple(sorted(job_calls.by_rank))
    mine = _way(job_calls, wait.rank, wait.key, ranks)
    if mine is None or wait.rank not in ranks:
        return False
    at = ranks.index(wait.rank)
    near = ranks[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]
    ways = [
        way
        for rank in near
        if rank != wait.rank and rank in job_calls.by_rank
        for key in job_calls.by_rank[rank].calls
        if (way := _way(job_calls, rank, key, ranks)) is not None and way[:-1] == mine[:-1]
    ]
    return len(ways) > 1 and len(set(ways)) == 1 and ways[0] != mine


def _way(
    job_calls: JobCalls, rank: int, key: StreamKey, ranks: tuple[int, ...]
) -> tuple[int, bool, str, int] | None:
    """Of the last message of a stream: its group, whether it is sent, its line, and how far around
    the peer is."""
    calls = job_calls.by_rank[rank].calls.get(key)
    peer = key.destination if key.source == rank else key.source
    if calls is None or key.source == key.destination or rank not in ranks or peer not in ranks:
        return None
    line = calls.of(calls.last)[1].site_id[2]
    return (
        (key.group, key.source == rank, line, (ranks.index(peer) - ranks.index(rank)) % len(ranks))
        if line
        else None
    )

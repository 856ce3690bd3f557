"""Who waits for whom: the collectives that some ranks issued and others did not.

Takes a hearing, gives for each rank the call it must be stuck in, if there is one, and who has yet
to come. A rank that others wait for and that waits for nobody is where the trouble is; ranks that
wait for each other in a circle are a deadlock. Ranks that wait for the same ones share one tuple of
them: thousands may wait for thousands.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass

from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import JobCalls, RankCalls

_OF_ALL = re.compile(r"all_|reduce_scatter|barrier")
_RECENT = 16  # records back, in which a message may still be waited for


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that issued a collective which is not complete."""

    rank: int
    key: StreamKey
    number: int
    missing: tuple[int, ...]  # who has not issued it, by their own boxes, or cannot go on in it
    no_data: tuple[int, ...]  # members without a box: nobody knows


def members(job_calls: JobCalls, key: StreamKey) -> tuple[int, ...]:
    """Who takes part: the ranks of the group, or sender and receiver. A message from anybody has no
    known sender."""
    if key.source == key.destination == -1:
        return job_calls.group(key).ranks
    return tuple(rank for rank in (key.source, key.destination) if rank >= 0)


def waits(
    job_calls: JobCalls, *, held: Collection[int] = (), failed_in_it: Collection[int] = ()
) -> dict[int, Wait]:
    """For each rank that has one, the incomplete call it must be in. `held` are ranks that are
    stopped, or dead; `failed_in_it` those whose last call raised."""
    streams: dict[StreamKey, dict[int, int]] = {}
    for rank, rank_calls in job_calls.by_rank.items():
        for key, count in rank_calls.counts.items() if job_calls.has_data(rank) else ():
            streams.setdefault(key, {})[rank] = count
    candidates: defaultdict[int, list[Wait]] = defaultdict(list)
    for key, counts in streams.items():
        for wait in _incomplete(job_calls, key, counts):
            candidates[wait.rank].append(wait)
    found = {rank: _blocking(job_calls.by_rank[rank], each) for rank, each in candidates.items()}
    passed = (
        {_left(said) for rank, said in job_calls.by_rank.items() if rank not in failed_in_it}
        if held
        else set()
    )
    found = _waits_for_held(job_calls, held, streams, found, passed) | found
    found |= _waits_for_unheard(job_calls, awaited(found), streams)
    return found | _waits_for_anybody(job_calls, awaited(found))


def _incomplete(job_calls: JobCalls, key: StreamKey, counts: dict[int, int]) -> list[Wait]:
    """Of each rank, its first call in this stream that somebody has not issued."""
    taking_part = members(job_calls, key)
    if len(taking_part) < 2 or _listens_to_anybody(job_calls, key):
        return []
    if len(counts) < len(taking_part) or counts.keys() != set(taking_part):
        counts = {rank: counts.get(rank, 0) for rank in taking_part if job_calls.has_data(rank)}
    lowest, highest = min(counts.values(), default=0), max(counts.values(), default=0)
    if lowest == highest:
        return []
    no_data = tuple(rank for rank in taking_part if rank not in counts)
    behind = tuple(rank for rank in taking_part if counts.get(rank) == lowest)
    return [
        Wait(rank, key, lowest, behind, no_data)
        for rank in taking_part
        if counts.get(rank, lowest) > lowest
    ]


def _waits_for_held(
    job_calls: JobCalls,
    held: Collection[int],
    streams: dict[StreamKey, dict[int, int]],
    found: Container[int],
    passed: Container[tuple[StreamKey, int] | None],
) -> dict[int, Wait]:
    """Of ranks that all came to one call: those that stand there with one who was stopped in it, or
    died in it."""
    stuck: defaultdict[tuple[StreamKey, int], list[int]] = defaultdict(list)
    for rank in held:
        call = _stands_in(job_calls.by_rank[rank])
        if call is not None and rank not in found and job_calls.has_data(rank):
            stuck[call].append(rank)
    waiting: dict[int, Wait] = {}
    for (key, number), ranks in stuck.items():
        # somebody got through it
        if max(streams[key].values()) > number + 1 or (key, number) in passed:
            continue
        missing = tuple(sorted(ranks))
        others = (rank for rank in streams[key] if rank not in held and rank not in found)
        standing = [rank for rank in others if _stands_in(job_calls.by_rank[rank]) == (key, number)]
        waiting |= {rank: Wait(rank, key, number, missing, ()) for rank in standing}
    return waiting


def _stands_in(rank_calls: RankCalls) -> tuple[StreamKey, int] | None:
    """The call that a rank is in, by its last record and its cursor."""
    return rank_calls.last if rank_calls.in_collective_since_ns is not None else None


def _left(rank_calls: RankCalls) -> tuple[StreamKey, int] | None:
    """The last call of a rank, if it is one that nobody gets past before all have issued it, and
    this one has returned."""
    call = rank_calls.last
    if call is None or rank_calls.in_collective_since_ns is not None or rank_calls.is_async(*call):
        return None
    return call if is_of_all(rank_calls, *call) else None


def _listens_to_anybody(job_calls: JobCalls, key: StreamKey) -> bool:
    """Whether the receiver of messages takes some from whoever writes: whose they were is not
    known, so none can be missed."""
    if key.source == key.destination or key.destination not in job_calls.by_rank:
        return False
    return StreamKey(key.group, -1, key.destination) in job_calls.by_rank[key.destination].counts


def _waits_for_anybody(job_calls: JobCalls, suspects: list[int]) -> dict[int, Wait]:
    """Of ranks that others wait for, those that listen to anybody: they may wait for any of the
    other suspects."""
    listening = {}
    for rank in suspects:
        rank_calls = job_calls.by_rank[rank]
        call = rank_calls.last
        if (
            call is not None
            and rank_calls.in_collective_since_ns is not None
            and call[0].source < 0 <= call[0].destination
        ):
            listening[rank] = call
    others = tuple(rank for rank in suspects if rank not in listening)
    found = {}
    for rank, call in listening.items():
        no_data = tuple(
            member for member in job_calls.group(call[0]).ranks if not job_calls.has_data(member)
        )
        if others or no_data:
            found[rank] = Wait(rank, *call, others, no_data)
    return found


def _blocking(rank_calls: RankCalls, candidates: list[Wait]) -> Wait:
    """The call a rank is in. One that returns only when it is done was the last it issued; of those
    that return at once, the first that is not done is what it waits for sooner or later."""
    if len(candidates) == 1:
        return candidates[0]
    in_order = sorted(candidates, key=lambda wait: rank_calls.order(wait.key, wait.number))
    is_async = rank_calls.is_async(in_order[-1].key, in_order[-1].number)
    return in_order[-1] if is_async is False else in_order[0]


def _waits_for_unheard(
    job_calls: JobCalls, suspects: Iterable[int], streams: dict[StreamKey, dict[int, int]]
) -> dict[int, Wait]:
    """Of ranks that others wait for: those that stand in a collective themselves, with a member
    that has no box.

    Whether that one has come nobody knows, unless somebody has gone on to the next. Who stands
    there is not to blame for it.
    """
    found: dict[int, Wait] = {}
    # in a call: one tuple for all who stand there
    no_data: dict[tuple[StreamKey, int], tuple[int, ...]] = {}
    for rank in suspects:
        rank_calls = job_calls.by_rank[rank]
        call = rank_calls.last
        if call is None or rank_calls.in_collective_since_ns is None:
            continue
        if call not in no_data:
            # Of a broadcast, a receiver goes on while the root still waits for another one: that
            # says nothing.
            is_newest = max(streams[call[0]].values()) == call[1] + 1 or not is_of_all(
                rank_calls, *call
            )
            taking_part = members(job_calls, call[0]) if is_newest else ()
            no_data[call] = tuple(
                member for member in taking_part if not _is_readable(job_calls, member, *call)
            )
        if no_data[call]:
            found[rank] = Wait(rank, *call, (), no_data[call])
    return found


def _is_readable(job_calls: JobCalls, member: int, key: StreamKey, number: int) -> bool:
    """Whether it is known of a rank what it issued at a number, or that it has not come to it."""
    rank_calls = job_calls.by_rank.get(member)
    if rank_calls is None or not job_calls.has_data(member):
        return False
    return rank_calls.counts.get(key, 0) <= number or (
        key in rank_calls.calls and rank_calls.calls[key].at(number) is not None
    )


def is_of_all(rank_calls: RankCalls, key: StreamKey, number: int) -> bool:
    """Whether nobody gets past a collective before all have issued it; not so where it has a root,
    or is a message."""
    calls = rank_calls.calls.get(key)
    return (
        calls is not None
        and calls.at(number) is not None
        and _OF_ALL.match(calls.of(number)[0].op) is not None
    )


def has_lost_its_newest(rank_calls: RankCalls) -> bool:
    """Whether a rank has counted calls after the last one that can be read: its box was cut, or
    damaged."""
    has_wrapped = rank_calls.label.counts.overwritten > 0
    for key, count in rank_calls.counts.items():  # of all ranks, several times: no generator
        calls = rank_calls.calls.get(key)
        if count and (not has_wrapped if calls is None else calls.first + len(calls) < count):
            return True
    return False


def awaited(found: dict[int, Wait]) -> list[int]:
    """The ranks that others wait for and that wait for nobody themselves: where the trouble is."""
    return sorted({rank for missing in _each_once(found) for rank in missing if rank not in found})


def waiting_for(found: dict[int, Wait], ranks: Iterable[int]) -> list[Wait]:
    """Those who wait for one of these ranks."""
    wanted = frozenset(ranks)
    touched = {id(missing) for missing in _each_once(found) if not wanted.isdisjoint(missing)}
    return [wait for wait in found.values() if id(wait.missing) in touched]


def _each_once(found: dict[int, Wait]) -> list[tuple[int, ...]]:
    """The different tuples of missing ranks."""
    return list({id(wait.missing): wait.missing for wait in found.values()}.values())


def cycle(found: dict[int, Wait]) -> list[Wait]:
    """Ranks that wait for each other, in order, the last one for the first; empty where there is no
    such circle."""
    following = {id(missing): _first_in(missing, found) for missing in _each_once(found)}
    cleared: set[int] = set()  # nobody of these comes to a circle
    for start in sorted(found):
        path: dict[int, None] = {}
        rank = start
        while rank in found and rank not in path and rank not in cleared:
            path[rank] = None
            rank = following[id(found[rank].missing)]
        if rank in path:
            ranks = list(path)
            return [found[member] for member in ranks[ranks.index(rank) :]]
        cleared.update(path)
    return []


def _first_in(ranks: tuple[int, ...], found: Container[int]) -> int:
    return next((rank for rank in ranks if rank in found), -1)


def new_peers(job_calls: JobCalls, found: Iterable[Wait]) -> list[Wait]:
    """Of ranks that wait, those that listen to a rank for the first time while another one, to
    which they have listened, has written to them; or that write to one for the first time while
    another one, to which they have written, listens. Whether one that was not heard does is not
    known: it may."""
    messages = [
        wait for wait in found if wait.key.source != wait.key.destination and wait.number == 0
    ]
    if not messages:
        return []
    # to or from whom, by others
    sent: dict[tuple[int, int, bool], list[tuple[StreamKey, int]]] = {}
    for rank, rank_calls in job_calls.by_rank.items():
        for key, count in rank_calls.counts.items():
            if key.source != key.destination and rank in (key.source, key.destination):
                other, is_receiver = (
                    (key.destination, True) if rank == key.source else (key.source, False)
                )
                sent.setdefault((key.group, other, is_receiver), []).append((key, count))
    return [wait for wait in messages if _is_expected_elsewhere(job_calls, wait, sent)]


def _is_expected_elsewhere(
    job_calls: JobCalls, wait: Wait, sent: dict[tuple[int, int, bool], list[tuple[StreamKey, int]]]
) -> bool:
    own, is_receiver = job_calls.by_rank[wait.rank].counts, wait.key.destination == wait.rank
    streams = sent.get((wait.key.group, wait.rank, is_receiver), ())
    if any(count > own.get(key, 0) >= 1 for key, count in streams if key != wait.key):
        return True
    usual = [
        key
        for key in own
        if key.group == wait.key.group and key.source != key.destination and key != wait.key
    ]
    peers = [
        key.source if is_receiver else key.destination
        for key in usual
        if (key.destination == wait.rank) == is_receiver
    ]
    return any(peer >= 0 and not job_calls.has_data(peer) for peer in peers)


def may_wait_for(job_calls: JobCalls, rank: int, no_data: Container[int]) -> int | None:
    """A rank without a box for which this one may wait itself: its last message to or from it may
    still be under way."""
    rank_calls = job_calls.by_rank[rank]
    recent = rank_calls.rank_summary.records - _RECENT
    for key, calls in rank_calls.calls.items():
        other = key.destination if key.source == rank else key.source
        if (
            key.source != key.destination
            and other in no_data
            and calls.record(calls.last) >= recent
        ):
            return other
    return None

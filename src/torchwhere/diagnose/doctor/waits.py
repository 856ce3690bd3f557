"""Finds which rank waits for which: collectives that some ranks issued and others did not.

Takes the calls of a job. Gives, for each rank, the call that it must be blocked in, if any, and the
ranks that have not reached it. A rank that others wait for, and that waits for no rank, is the
culprit; ranks that wait for each other in a cycle are a deadlock. Ranks that wait for the same
ranks share one tuple of them: thousands may wait for thousands.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchwhere.core.grouping import grouped
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls

_OF_ALL = re.compile(r"all_|reduce_scatter|barrier")
_RECENT = 16  # newest records in which a message may still be incomplete


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that issued a collective which is not complete."""

    rank: int
    key: StreamKey
    number: int
    missing: tuple[int, ...]  # ranks that have not issued it, or cannot complete it
    no_data: tuple[int, ...]  # members without data

    @property
    def call(self) -> tuple[StreamKey, int]:
        """The collective: its stream and its number."""
        return self.key, self.number


def waits(
    job_calls: JobCalls, *, held: Collection[int] = (), failed_in_it: Collection[int] = ()
) -> dict[int, Wait]:
    """For each waiting rank, the incomplete call it must be in.

    `held` are ranks that are stopped or have exited; `failed_in_it` are ranks whose last call
    raised.
    """
    streams: dict[StreamKey, dict[int, int]] = {}
    for rank, rank_calls in job_calls.by_rank.items():
        for key, count in rank_calls.counts.items() if job_calls.has_data(rank) else ():
            streams.setdefault(key, {})[rank] = count
    candidates = grouped(
        (wait.rank, wait)
        for key, counts in streams.items()
        for wait in _incomplete(job_calls, key, counts)
    )
    by_rank = {rank: _blocking(job_calls.by_rank[rank], own) for rank, own in candidates.items()}
    if held:
        ranks = job_calls.by_rank.items()
        passed = {_left(rank_calls) for rank, rank_calls in ranks if rank not in failed_in_it}
        by_rank = _waits_for_held(job_calls, held, streams, by_rank, passed) | by_rank
    by_rank |= _waits_for_no_data(job_calls, awaited(by_rank), streams)
    return by_rank | _waits_for_any_source(job_calls, awaited(by_rank))


def _incomplete(job_calls: JobCalls, key: StreamKey, counts: dict[int, int]) -> list[Wait]:
    """For each rank, its first call in this stream that a member has not issued."""
    taking_part = job_calls.members(key)
    if len(taking_part) < 2 or _receives_from_any(job_calls, key):
        return []
    if counts.keys() != set(taking_part):
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
    waiting_already: Container[int],
    passed: Container[tuple[StreamKey, int] | None],
) -> dict[int, Wait]:
    """Waits of ranks in one call with a rank that was stopped, or exited, inside it."""
    stuck: dict[tuple[StreamKey, int], list[int]] = {}
    for rank in held:
        call = _current_call(job_calls.by_rank[rank])
        if call is not None and rank not in waiting_already and job_calls.has_data(rank):
            stuck.setdefault(call, []).append(rank)
    waiting: dict[int, Wait] = {}
    for call, ranks in stuck.items():
        key, number = call
        # a rank completed it
        if max(streams[key].values()) > number + 1 or call in passed:
            continue
        missing = tuple(sorted(ranks))
        for rank in streams[key]:
            is_other = rank not in held and rank not in waiting_already
            if is_other and _current_call(job_calls.by_rank[rank]) == call:
                waiting[rank] = Wait(rank, key, number, missing, ())
    return waiting


def _current_call(rank_calls: RankCalls) -> tuple[StreamKey, int] | None:
    """The call that a rank is in, by its last record and its cursor."""
    return rank_calls.last if rank_calls.in_collective_since_ns is not None else None


def _left(rank_calls: RankCalls) -> tuple[StreamKey, int] | None:
    """The last call of a rank, if it needs all ranks and has returned."""
    call = rank_calls.last
    if call is None or rank_calls.in_collective_since_ns is not None or rank_calls.is_async(*call):
        return None
    return call if is_of_all(rank_calls, *call) else None


def _receives_from_any(job_calls: JobCalls, key: StreamKey) -> bool:
    """Whether the receiver also receives from any source: senders are then unknown, and no
    message counts as missing."""
    receiver = job_calls.by_rank.get(key.destination)
    from_any = StreamKey(key.group, -1, key.destination)
    return key.is_p2p and receiver is not None and from_any in receiver.counts


def _waits_for_any_source(job_calls: JobCalls, suspects: list[int]) -> dict[int, Wait]:
    """Awaited ranks that receive from any source: they may wait for any other suspect."""
    listening = {}
    for rank in suspects:
        call = _current_call(job_calls.by_rank[rank])
        if call is not None and call[0].source < 0 <= call[0].destination:
            listening[rank] = call
    others = tuple(rank for rank in suspects if rank not in listening)
    by_rank = {}
    for rank, call in listening.items():
        no_data = tuple(
            member for member in job_calls.group(call[0]).ranks if not job_calls.has_data(member)
        )
        if others or no_data:
            by_rank[rank] = Wait(rank, *call, others, no_data)
    return by_rank


def _blocking(rank_calls: RankCalls, candidates: list[Wait]) -> Wait:
    """The call a rank is in.

    A call that blocks the CPU is the last one that it issued. Of other calls, asynchronous ones and
    those on a device, the first incomplete one is what it waits for sooner or later.
    """
    if len(candidates) == 1:
        return candidates[0]
    in_order = sorted(candidates, key=lambda wait: rank_calls.order(*wait.call))
    last = in_order[-1]
    is_blocking = rank_calls.is_async(*last.call) is False
    return last if is_blocking and not rank_calls.is_on_device(*last.call) else in_order[0]


def _waits_for_no_data(
    job_calls: JobCalls, suspects: Iterable[int], streams: dict[StreamKey, dict[int, int]]
) -> dict[int, Wait]:
    """Awaited ranks that are themselves in a collective with a rank without data.

    It is unknown whether that rank has come, unless another one has continued with the next call. A
    rank that is blocked there is not to blame.
    """
    by_rank: dict[int, Wait] = {}
    # by call: one tuple for all ranks that are in it
    no_data: dict[tuple[StreamKey, int], tuple[int, ...]] = {}
    for rank in suspects:
        rank_calls = job_calls.by_rank[rank]
        call = _current_call(rank_calls)
        if call is None:
            continue
        if call not in no_data:
            # A receiver of a broadcast continues while the root still waits for another rank: that
            # proves nothing.
            is_newest = max(streams[call[0]].values()) == call[1] + 1 or not is_of_all(
                rank_calls, *call
            )
            taking_part = job_calls.members(call[0]) if is_newest else ()
            no_data[call] = tuple(
                member for member in taking_part if not _is_readable(job_calls, member, *call)
            )
        if no_data[call]:
            by_rank[rank] = Wait(rank, *call, (), no_data[call])
    return by_rank


def _is_readable(job_calls: JobCalls, member: int, key: StreamKey, number: int) -> bool:
    """Whether the call of a rank at a number is known, or that it has not reached it."""
    rank_calls = job_calls.by_rank.get(member)
    if rank_calls is None or not job_calls.has_data(member):
        return False
    return rank_calls.counts.get(key, 0) <= number or (
        key in rank_calls.calls and rank_calls.calls[key].at(number) is not None
    )


def is_of_all(rank_calls: RankCalls, key: StreamKey, number: int) -> bool:
    """Whether a collective completes only after all ranks have issued it; not so with a root, or
    for a message."""
    calls = rank_calls.calls.get(key)
    if calls is None or calls.at(number) is None:
        return False
    return _OF_ALL.match(calls.of(number)[0].op) is not None


def awaited(by_rank: Mapping[int, Wait]) -> list[int]:
    """The ranks that others wait for and that do not wait themselves: the likely culprits."""
    return sorted(
        {rank for missing in missing_once(by_rank) for rank in missing if rank not in by_rank}
    )


def waiting_for(by_rank: Mapping[int, Wait], ranks: Iterable[int]) -> list[Wait]:
    """The waits for one of these ranks."""
    wanted = frozenset(ranks)
    touched = {id(missing) for missing in missing_once(by_rank) if not wanted.isdisjoint(missing)}
    return [wait for wait in by_rank.values() if id(wait.missing) in touched]


def missing_once(by_rank: Mapping[int, Wait]) -> list[tuple[int, ...]]:
    """The different tuples of missing ranks."""
    return list({id(wait.missing): wait.missing for wait in by_rank.values()}.values())


def cycle(by_rank: Mapping[int, Wait]) -> list[Wait]:
    """Ranks that wait for each other, in order, the last one for the first; empty if there is no
    cycle."""
    following = {
        id(missing): next((rank for rank in missing if rank in by_rank), -1)
        for missing in missing_once(by_rank)
    }
    cleared: set[int] = set()  # ranks that lead to no cycle
    for start in sorted(by_rank):
        path: dict[int, None] = {}
        rank = start
        while rank in by_rank and rank not in path and rank not in cleared:
            path[rank] = None
            rank = following[id(by_rank[rank].missing)]
        if rank in path:
            ranks = list(path)
            return [by_rank[member] for member in ranks[ranks.index(rank) :]]
        cleared.update(path)
    return []


def cycle_apart_from(
    suspects: Collection[int], job_calls: JobCalls, by_rank: Mapping[int, Wait]
) -> list[Wait]:
    """A cycle of ranks that are in blocking calls and do not wait for the suspects, not even
    through other ranks: the suspects did not cause it. Empty if there is none."""
    waits = cycle(by_rank)
    for wait in waits:
        rank_calls = job_calls.by_rank[wait.rank]
        if _current_call(rank_calls) != wait.call or rank_calls.is_async(*wait.call) is not False:
            return []
    reached = _reached_from(waits, by_rank)
    return waits if reached is not None and reached.isdisjoint(suspects) else []


def _reached_from(waits: list[Wait], by_rank: Mapping[int, Wait]) -> frozenset[int] | None:
    """The ranks that ranks of a cycle wait for, directly or through others; None if one of them has
    no data."""
    reached: set[int] = set()
    seen: set[int] = set()  # tuples of missing ranks, by id
    left = list(waits)
    while left:
        wait = left.pop()
        if wait.no_data:
            return None
        if id(wait.missing) not in seen:
            seen.add(id(wait.missing))
            left += [by_rank[rank] for rank in wait.missing if rank in by_rank]
            reached.update(wait.missing)
    return frozenset(reached)


def links(cycle: Sequence[Wait]) -> Iterator[tuple[Wait, Wait]]:
    """Each wait of a cycle, with that of the rank that it waits for."""
    return zip(cycle, [*cycle[1:], *cycle[:1]], strict=True)


def new_peers(job_calls: JobCalls, all_waits: Iterable[Wait]) -> list[Wait]:
    """Waits for a first message with a new peer while an earlier peer has an unmatched message in
    the same direction.

    An earlier peer without data may have one.
    """
    messages = [wait for wait in all_waits if wait.key.is_p2p and wait.number == 0]
    if not messages:
        return []
    # messages of the other ranks, by peer and direction
    sent = grouped(
        ((key.group, _peer(key, rank), rank == key.source), (key, count))
        for rank, rank_calls in job_calls.by_rank.items()
        for key, count in rank_calls.counts.items()
        if key.is_p2p and rank in (key.source, key.destination)
    )
    return [wait for wait in messages if _is_expected_elsewhere(job_calls, wait, sent)]


def _peer(key: StreamKey, rank: int) -> int:
    """The other end of the messages of a rank."""
    return key.destination if key.source == rank else key.source


def _is_expected_elsewhere(
    job_calls: JobCalls, wait: Wait, sent: dict[tuple[int, int, bool], list[tuple[StreamKey, int]]]
) -> bool:
    own, is_receiver = job_calls.by_rank[wait.rank].counts, wait.key.destination == wait.rank
    streams = sent.get((wait.key.group, wait.rank, is_receiver), ())
    if any(count > own.get(key, 0) >= 1 for key, count in streams if key != wait.key):
        return True
    peers = [
        _peer(key, wait.rank)
        for key in own
        if key.is_p2p
        and key.group == wait.key.group
        and key != wait.key
        and (key.destination == wait.rank) == is_receiver
    ]
    return any(peer >= 0 and not job_calls.has_data(peer) for peer in peers)


def may_wait_for(job_calls: JobCalls, rank: int, no_data: Container[int]) -> int | None:
    """A rank without data that this rank may wait for: its last message to or from it may be
    incomplete."""
    rank_calls = job_calls.by_rank[rank]
    recent = rank_calls.rank_summary.records - _RECENT
    for key, calls in rank_calls.calls.items():
        other = _peer(key, rank)
        if key.is_p2p and other in no_data and calls.record(calls.last) >= recent:
            return other
    return None

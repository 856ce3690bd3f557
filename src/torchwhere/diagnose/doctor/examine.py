"""Examines a job: takes all boxes and the states of the processes, gives one finding.

Applies the rules (`rules/`) in order until one of them finds something. Pure: reads no clock,
process or file, except the boxes of ranks that are late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchwhere.blackbox.run import RunSummary
from torchwhere.core.stall import ENDED_S, STALL_S
from torchwhere.diagnose.calls.job_calls import JobCalls, calls_of_run
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.calls.stream_calls import StreamCalls
from torchwhere.diagnose.clocks.host_clocks import UNALIGNED, HostClocks
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.exit_records import ended_well, interrupted
from torchwhere.diagnose.doctor.exits import Exits
from torchwhere.diagnose.doctor.finding import Finding
from torchwhere.diagnose.doctor.reached import without_unreached
from torchwhere.diagnose.doctor.rules import RULES
from torchwhere.diagnose.doctor.timing import Timing
from torchwhere.diagnose.doctor.waits import Wait, waits
from torchwhere.gpus.samples import HostGpus
from torchwhere.processes.status import ProcessStatus


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A finding, and everything that was known."""

    context: Context
    finding: Finding


def examine(
    run: RunSummary[Any],
    *,
    statuses: Mapping[int, ProcessStatus] | None = None,
    now_ns: int | None = None,
    stall_s: float = STALL_S,
    is_suspicion: bool = False,
    job_calls: JobCalls | None = None,
    align_clocks: Callable[[], HostClocks] = lambda: UNALIGNED,
    gpus: Sequence[HostGpus] = (),
) -> Diagnosis:
    """Find what is wrong with a run.

    Args:
        run: The run.
        statuses: The observed states of its processes.
        now_ns: The wall clock while the job runs; without it, the newest records are the end.
        stall_s: A wait of this many seconds is a hang.
        is_suspicion: Whether this is preliminary, before the suspects were asked for their stacks.
        job_calls: The calls of the boxes, if they have been loaded already.
        align_clocks: Aligns the clocks of the hosts; called only if a rule compares them.
        gpus: The GPUs of the hosts, as monitors sampled them.
    """
    job_calls = rebase_numbers(job_calls if job_calls is not None else calls_of_run(run))
    ended_externally = interrupted(job_calls, waited_s=min(ENDED_S, stall_s / 2))
    exits = Exits(job_calls, dict(statuses or {}), now_ns, ended_externally)
    context = Context(
        run,
        job_calls,
        exits,
        Timing(exits, stall_s),
        _waits(job_calls, exits),
        align_clocks,
        is_suspicion,
        gpus,
    )
    findings = (rule(context) for rule in RULES)
    return Diagnosis(context, next(finding for finding in findings if finding is not None))


def _waits(job_calls: JobCalls, exits: Exits) -> dict[int, Wait]:
    failed = exits.failed() if exits.held else []
    failed_in_it = {rank for rank in failed if exits.lost_its_peer(rank) or exits.timed_out(rank)}
    if first := list(filter(exits.may_be_first, exits.held)):
        ended = {rank: own.end for rank, own in job_calls.by_rank.items()}
        finished = {rank for rank, end in ended.items() if end is not None and ended_well(end)}
        job_calls = without_unreached(job_calls, first, finished=finished)
    return waits(job_calls, held=exits.held, failed_in_it=failed_in_it)


# -- equal numbers of calls ------------------------------------------------------------------------
# A watch that begins late continues from the number of collectives that the group reports. With
# gloo this number includes messages, and not all ranks send equally many. Then one collective has
# different numbers on different ranks. But a difference may also be right: the ranks began to watch
# at different moments. The calls themselves decide: `rebase_numbers` compares them as numbered, and
# with each rank numbered from its own beginning, and takes the numbering under which they agree.


# In the header of a box: the counts of groups when the watch began, if they were not 0.
COUNTED = "counted"


def rebase_numbers(job_calls: JobCalls) -> JobCalls:
    """Returns the same calls with the numbering under which the ranks of each group agree."""
    late = {}
    for rank, rank_calls in job_calls.by_rank.items():
        counts = _counts_at_start(rank_calls)
        if counts:
            late[rank] = counts
    if not late:
        return job_calls
    rebased = job_calls.copy()
    for key in {key for rank in late for key in job_calls.by_rank[rank].calls if key.source == -1}:
        name = job_calls.group(key).name
        calls = {
            rank: rank_calls.calls[key]
            for rank, rank_calls in job_calls.by_rank.items()
            if key in rank_calls.calls
        }
        begins = {rank: late.get(rank, {}).get(name, 0) for rank in calls}
        if len(set(begins.values())) < 2:
            continue
        if _agreement(calls, begins) > _agreement(calls, dict.fromkeys(calls, 0)):
            for rank, begin in begins.items():
                rebased.by_rank[rank] = _numbered_from(rebased.by_rank[rank], key, begin)
    return rebased


def _counts_at_start(rank_calls: RankCalls) -> dict[str, int]:
    """Returns the counts of groups when the watch began, by name."""
    counts = rank_calls.box_summary.meta.get(COUNTED)
    if not isinstance(counts, dict):
        return {}
    return {
        name: count
        for name, count in counts.items()
        if isinstance(name, str) and type(count) is int and count > 0
    }


def _agreement(calls: Mapping[int, StreamCalls], begins: Mapping[int, int]) -> tuple[int, int]:
    """Scores a numbering by how well the calls of all ranks agree.

    The score is the number of calls that equal those of the rank with most calls, minus the number
    of calls that do not. The distance between the last calls of the ranks breaks ties.
    """
    longest = max(calls, key=lambda rank: len(calls[rank]))
    reference, score = calls[longest], 0
    for rank, own in calls.items():
        begin = max(own.first - begins[rank], reference.first - begins[longest])
        end = min(own.last - begins[rank], reference.last - begins[longest]) + 1
        if begin < end and rank != longest:
            here = own.packed_ids(begin + begins[rank], end + begins[rank])
            there = reference.packed_ids(begin + begins[longest], end + begins[longest])
            score += 2 * int(np.count_nonzero(here == there)) - len(here)
    lasts = [own.last - begins[rank] for rank, own in calls.items()]
    return score, min(lasts) - max(lasts)


def _numbered_from(rank_calls: RankCalls, key: StreamKey, begin: int) -> RankCalls:
    """Returns a copy in which the call with number `begin` gets number 0."""
    calls, last = rank_calls.calls[key], rank_calls.last
    if last is not None and last[0] == key:
        last = key, last[1] - begin
    return replace(
        rank_calls,
        calls=rank_calls.calls | {key: replace(calls, first=calls.first - begin)},
        counts=rank_calls.counts | {key: rank_calls.counts[key] - begin},
        last=last,
    )

"""Examines a job: takes all boxes and the states of the processes, gives one finding.

Applies the rules (`rules/`) in order until one of them finds something. Pure: reads no clock,
process or file, except the boxes of ranks that are late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchwhere.blackbox.run import RunSummary
from torchwhere.core.stall import ENDED_S, STALL_S
from torchwhere.diagnose.calls.job_calls import JobCalls, calls_of_run
from torchwhere.diagnose.calls.rebase import rebase_numbers
from torchwhere.diagnose.clocks.host_clocks import UNALIGNED, HostClocks
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.exit_records import interrupted
from torchwhere.diagnose.doctor.exits import Exits
from torchwhere.diagnose.doctor.finding import Finding
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
        stall_s: A wait of so many seconds is a hang.
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
        Timing(job_calls, exits, now_ns, stall_s),
        _waits(job_calls, exits),
        align_clocks,
        is_suspicion,
        gpus,
    )
    findings = (rule(context) for rule in RULES)
    return Diagnosis(context, next(finding for finding in findings if finding is not None))


def _waits(job_calls: JobCalls, exits: Exits) -> dict[int, Wait]:
    held = {
        rank
        for rank in job_calls.by_rank
        if exits.status(rank).is_stopped
        or (exits.is_dead(rank) and not exits.exited_with_the_job(rank))
    }
    failed = exits.failed() if held else []
    failed_in_it = {rank for rank in failed if exits.lost_its_peer(rank) or exits.timed_out(rank)}
    return waits(job_calls, held=held, failed_in_it=failed_in_it)

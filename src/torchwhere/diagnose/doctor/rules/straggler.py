"""Rule: the job progresses, but ranks are late repeatedly."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchwhere.core.place import Certainty
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import Cause, Finding
from torchwhere.diagnose.doctor.stack_samples import sampled_place
from torchwhere.diagnose.doctor.stragglers import Straggler, straggler
from torchwhere.diagnose.doctor.verdict import VerdictKind


@dataclass(frozen=True, slots=True)
class LateRanks(Cause):
    """Ranks that are late repeatedly."""

    straggler: Straggler
    ended_unfinished: bool  # no process is left, and the job had not finished


def find_straggler(context: Context) -> Finding | None:
    late = straggler(context.job_calls, align_clocks=context.align_clocks)
    late = _late_by_samples(context) if late is None else with_samples(late, context.job_calls)
    if late is None:
        return None
    ended_unfinished = context.exits.ended_unfinished
    return Finding(
        VerdictKind.STRAGGLER,
        LateRanks(late, ended_unfinished),
        culprits=late.ranks,
        certainty=Certainty.INFERRED,
        facts=late.to_dict() | {"ended_unfinished": ended_unfinished},
    )


def _late_by_samples(context: Context) -> Straggler | None:
    """The rank whose CPU comes late to calls of its device, if its stack shows why.

    If each CPU waits for its device in each step, all of them take as long from one call to the
    next. Those of a job in which one CPU was late once, and which nothing has slowed down since,
    look the same: only the samples tell them apart.
    """
    job_calls = context.job_calls
    if all(rank_calls.rank_summary.device is None for rank_calls in job_calls.by_rank.values()):
        return None
    late = straggler(job_calls, align_clocks=context.align_clocks, trusts_cpus=False)
    if late is None or late.on_device:
        return None
    late = with_samples(replace(late, ranks=(late.rank,)), job_calls, is_repeated=True)
    return late if late.sampled is not None else None


def with_samples(late: Straggler, job_calls: JobCalls, *, is_repeated: bool = False) -> Straggler:
    """Add the place where the stack of the late rank was. The stack says nothing about a device."""
    if late.on_device:
        return late
    sampled = sampled_place(
        job_calls,
        late.rank,
        others=[rank for rank in job_calls.by_rank if rank not in late.ranks],
        since_step=late.since_step,
        share=late.share,
        is_repeated=is_repeated,
    )
    return replace(late, sampled=sampled)

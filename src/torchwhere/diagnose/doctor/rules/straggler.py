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


def find_straggler(context: Context) -> Finding | None:
    late = straggler(context.job_calls, align_clocks=context.align_clocks)
    if late is None:
        return None
    late = with_samples(late, context.job_calls)
    return Finding(
        VerdictKind.STRAGGLER,
        LateRanks(late),
        culprits=late.ranks,
        certainty=Certainty.INFERRED,
        facts=late.to_dict(),
    )


def with_samples(late: Straggler, job_calls: JobCalls) -> Straggler:
    """Add the place where the stack of the late rank was. The stack says nothing about a device."""
    if late.on_device:
        return late
    sampled = sampled_place(
        job_calls,
        late.rank,
        others=[rank for rank in job_calls.by_rank if rank not in late.ranks],
        since_step=late.since_step,
        share=late.share,
    )
    return replace(late, sampled=sampled)

"""Rule: the job progresses, but ranks are late repeatedly."""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import Cause, Finding
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
    return Finding(
        VerdictKind.STRAGGLER,
        LateRanks(late),
        culprits=late.ranks,
        certainty=Certainty.INFERRED,
        facts=late.to_dict(),
    )

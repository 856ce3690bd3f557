"""Rule: all ranks are blocked in one collective, and none is missing from it."""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.blocked import all_blocked_s, are_all_blocked
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import Cause, Finding
from torchwhere.diagnose.doctor.verdict import VerdictKind


@dataclass(frozen=True, slots=True)
class BlockedTogether(Cause):
    """All ranks are in the same collective."""


def find_blocked_together(context: Context) -> Finding | None:
    if not are_all_blocked(context):
        return None
    return Finding(
        VerdictKind.TOGETHER,
        BlockedTogether(),
        call=context.last_call,
        certainty=Certainty.INFERRED if context.no_data else Certainty.EXACT,
        stalled_s=all_blocked_s(context),
        blocked=frozenset(context.job_calls.by_rank),
    )

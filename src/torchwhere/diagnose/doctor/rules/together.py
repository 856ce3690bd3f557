"""Rule: all ranks are blocked in one collective, and none is missing from it."""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.diagnose.doctor.blocked import all_blocked_s, are_all_blocked
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import Cause, Finding, exact_if
from torchwhere.diagnose.doctor.pauses import pause_of
from torchwhere.diagnose.doctor.verdict import VerdictKind


@dataclass(frozen=True, slots=True)
class BlockedTogether(Cause):
    """All ranks are in the same collective."""


def find_blocked_together(context: Context) -> Finding | None:
    if not are_all_blocked(context) or _are_paused(context):
        return None
    return Finding(
        VerdictKind.TOGETHER,
        BlockedTogether(),
        call=context.last_call,
        certainty=exact_if(not context.no_data),
        stalled_s=all_blocked_s(context),
        blocked=frozenset(context.by_rank),
    )


def _are_paused(context: Context) -> bool:
    """Whether a rank still does what takes long in a healthy job too. On a device, a rank that
    saves has issued its last collective, and its stack may show no other one."""
    if context.timing.is_over:
        return False
    lasted_s = all_blocked_s(context) or 0.0
    pauses = (pause_of(context, [rank]) for rank in context.by_rank)
    return any(pause.kind is not None and lasted_s < pause.limit_s for pause in pauses)

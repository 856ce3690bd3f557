"""Explains a finding: the sentences on its cause. `_TEXTS` has the function of each cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import Cause
from torchwhere.diagnose.doctor.rules.alltoall_splits import UnmatchedSplits
from torchwhere.diagnose.doctor.rules.deadlock import Deadlock
from torchwhere.diagnose.doctor.rules.device_hang import (
    BlockedDevices,
    DeviceDeadlock,
    DevicesBlockedTogether,
)
from torchwhere.diagnose.doctor.rules.exited import (
    ExitedRanks,
    TimedOutTogether,
    UnknownFirstExit,
)
from torchwhere.diagnose.doctor.rules.exited_first import ExitedBeforeOthers
from torchwhere.diagnose.doctor.rules.group_creation import DifferentGroups, PendingGroup
from torchwhere.diagnose.doctor.rules.lost_data import LostData
from torchwhere.diagnose.doctor.rules.mismatch import DifferentCalls
from torchwhere.diagnose.doctor.rules.missing import MissingRanks
from torchwhere.diagnose.doctor.rules.no_fault import (
    EndedUnfinished,
    Finished,
    Progressing,
    ProgressingAtEnd,
    Quiet,
    UnobservedEnd,
)
from torchwhere.diagnose.doctor.rules.straggler import LateRanks
from torchwhere.diagnose.doctor.rules.together import BlockedTogether
from torchwhere.diagnose.doctor.rules.wrong_peer import WrongPeers
from torchwhere.render.verdict_text import (
    deadlock,
    device,
    exits,
    group_creation,
    mismatch,
    missing,
    no_fault,
    straggler,
)


def explain(cause: Cause, context: Context) -> list[str]:
    """The sentences on a cause: the fault, why, and what to look at."""
    return _TEXTS[type(cause)](cause, context)


def _ended_unfinished_text(cause: EndedUnfinished, context: Context) -> list[str]:
    until_then = explain(cause.until_then, context)
    return exits.ended_text(context) + until_then + exits.gone_first_text(cause)


_TEXTS: dict[type[Cause], Callable[[Any, Context], list[str]]] = {
    DifferentCalls: mismatch.different_calls_text,
    UnmatchedSplits: mismatch.unmatched_splits_text,
    WrongPeers: deadlock.wrong_peers_text,
    DifferentGroups: group_creation.different_groups_text,
    PendingGroup: group_creation.pending_group_text,
    BlockedDevices: device.blocked_devices_text,
    DevicesBlockedTogether: device.blocked_together_text,
    DeviceDeadlock: device.device_deadlock_text,
    ExitedRanks: exits.exited_ranks_text,
    UnknownFirstExit: exits.unknown_first_exit_text,
    TimedOutTogether: no_fault.timed_out_together_text,
    MissingRanks: missing.missing_ranks_text,
    Deadlock: deadlock.deadlock_text,
    BlockedTogether: no_fault.blocked_together_text,
    ExitedBeforeOthers: exits.exited_before_others_text,
    LateRanks: straggler.late_ranks_text,
    LostData: no_fault.lost_data_text,
    Finished: no_fault.finished_text,
    Progressing: no_fault.progressing_text,
    ProgressingAtEnd: no_fault.progressing_at_end_text,
    UnobservedEnd: no_fault.unobserved_end_text,
    Quiet: no_fault.quiet_text,
    EndedUnfinished: _ended_unfinished_text,
}

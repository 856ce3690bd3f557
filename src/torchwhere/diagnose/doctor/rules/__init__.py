"""The rules of the doctor. Each one takes the `Context` and returns a `Finding`, or None.

Entry point: `RULES`. An earlier finding explains the later ones, so the order counts.
"""

from __future__ import annotations

from collections.abc import Callable

from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import Finding
from torchwhere.diagnose.doctor.rules.alltoall_splits import find_unmatched_splits
from torchwhere.diagnose.doctor.rules.deadlock import find_deadlock
from torchwhere.diagnose.doctor.rules.device_hang import find_device_hang
from torchwhere.diagnose.doctor.rules.exited import (
    find_exited,
    find_extra_call,
    find_first_exit,
    find_unexplained_failure,
)
from torchwhere.diagnose.doctor.rules.group_creation import find_blocked_group_creation
from torchwhere.diagnose.doctor.rules.lost_data import find_lost_data
from torchwhere.diagnose.doctor.rules.mismatch import find_mismatch
from torchwhere.diagnose.doctor.rules.missing import find_missing
from torchwhere.diagnose.doctor.rules.no_fault import find_no_fault
from torchwhere.diagnose.doctor.rules.straggler import find_straggler
from torchwhere.diagnose.doctor.rules.together import find_blocked_together
from torchwhere.diagnose.doctor.rules.wrong_peer import find_wrong_peer

RULES: tuple[Callable[[Context], Finding | None], ...] = (
    find_mismatch,
    find_unmatched_splits,
    find_wrong_peer,
    find_blocked_group_creation,
    find_device_hang,
    find_extra_call,
    find_exited,
    find_missing,
    find_deadlock,
    find_blocked_together,
    find_first_exit,
    find_straggler,
    find_unexplained_failure,
    find_lost_data,
    find_no_fault,
)

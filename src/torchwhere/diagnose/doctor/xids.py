"""Which Xid errors of a GPU may have to do with a fault.

Takes the Xid errors that a monitor saw on the GPU of a rank, and a finding. The driver does not say
which process an error belongs to. Some errors end the process in which they occur. The driver also
reports these when clients of MPS are killed: on an H200 the kill of a job left an Xid 31, which
monitors of other jobs on the same GPU saw too. If a rank reports no error of its device, such an
error counts only if it came before the first exit, if the rank did not go on after it, and if it
can be why the job hangs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.exit_records import is_unexplained_abort
from torchwhere.diagnose.doctor.finding import Finding
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.gpus.samples import Gpu, Xid

CLEANUP = 45  # after a process was ended: always a consequence
OF_PROCESS = frozenset({13, 31, 32, 43, CLEANUP, 69})
SETTLE_NS = 2_000_000_000  # a monitor may see an error so long after the last sign of life
_NOTICED_NS = 500_000_000  # a process whose context has failed does not go on for so long
_SEEN_NS = 1_000_000_000  # monitors look for errors more often than this
_HANGS = frozenset(
    {VerdictKind.MISSING, VerdictKind.MISMATCH, VerdictKind.DEADLOCK, VerdictKind.TOGETHER}
)
_NEVER = 1 << 63


class SeenXid(NamedTuple):
    """An Xid error of a GPU, and when it came."""

    number: int
    after_progress_s: float | None  # since the last progress of a job that hangs; negative: before


class XidTimes(NamedTuple):
    """The times of one run with which the Xid errors of all its GPUs are compared."""

    context: Context
    finding: Finding
    progress_ns: int  # the last progress of any rank, on its CPU or its device
    first_exit_ns: int

    @classmethod
    def of(cls, context: Context, finding: Finding) -> XidTimes:
        moved = [own.device_moved_ns for own in context.by_rank.values()]
        return cls(
            context,
            finding,
            progress_ns=max([context.timing.recorded_ns, *moved]),
            first_exit_ns=_first_exit_ns(context),
        )

    def seen(self, gpu: Gpu, rank: int, ranks: Iterable[int]) -> tuple[SeenXid, ...]:
        """The Xid errors that may have to do with the fault of a rank; `ranks` are all on this
        GPU."""
        started = self.context.run.summaries[rank].meta.get("started_ns")
        begin_ns = started if isinstance(started, int) else 0
        end_ns = max(map(self._alive_ns, ranks))
        is_own = may_be_own(self.context, rank)
        is_hang = self.finding.kind in _HANGS
        return tuple(
            SeenXid(xid.number, (xid.t_ns - self.progress_ns) / 1e9 if is_hang else None)
            for xid in gpu.xids
            if begin_ns <= xid.t_ns <= end_ns + SETTLE_NS
            and (is_own or xid.number not in OF_PROCESS or self._may_matter(xid, rank, end_ns))
        )

    def _may_matter(self, xid: Xid, rank: int, end_ns: int) -> bool:
        """Whether an error of a process may be why a rank, which reports no error, has a fault."""
        own = self.context.by_rank.get(rank)
        issued_ns = own.issued_ns(*own.last) if own is not None and own.last is not None else 0
        last_ns = max(issued_ns, own.device_moved_ns if own is not None else 0)
        went_on = last_ns > xid.t_ns + _NOTICED_NS
        return not went_on and xid.t_ns <= min(end_ns, self.first_exit_ns, self._explains_until_ns)

    @property
    def _explains_until_ns(self) -> int:
        """Until when an error may explain the finding. If CPUs did not issue the calls, or issued
        them in different orders, later errors explain nothing; a device may fail later."""
        kind, is_on_device = self.finding.kind, bool(self.finding.facts.get("on_device"))
        is_of_device = kind is VerdictKind.TOGETHER or (
            is_on_device and kind is not VerdictKind.DEADLOCK
        )
        return _NEVER if kind not in _HANGS or is_of_device else self.progress_ns + _SEEN_NS

    def _alive_ns(self, rank: int) -> int:
        """When a rank was last alive; `_NEVER` if it still is."""
        exits, box = self.context.exits, self.context.run.summaries[rank]
        is_alive = exits.status(rank).alive
        return _NEVER if is_alive else max(exits.alive_ns(rank), box.last_ns, box.beat_ns)


def may_be_own(context: Context, rank: int) -> bool:
    """Whether a rank failed with an error of its device, or in a way that such an error has."""
    if rank not in context.by_rank:
        return False
    message = context.exits.exit_message(rank)
    return context.exits.device_error(rank) is not None or is_unexplained_abort(message)


def _first_exit_ns(context: Context) -> int:
    """When the first rank exited or failed."""
    exits = context.exits
    ends = [own.end.t_ns for own in context.by_rank.values() if own.end is not None]
    killed = [exits.alive_ns(rank) for rank in exits.killed()]
    return min([*ends, *exits.failed_ns(exits.failed()), *killed], default=_NEVER)

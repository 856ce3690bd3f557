"""The times of a job: when it was last alive, how long its ranks waited, and how long they may."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from torchwhere.core.stall import ENDED_AGAIN, ENDED_S
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.exits import Exits
from torchwhere.diagnose.doctor.waits import Wait

_UNUSUAL = 10  # times the usual
_UNSEEN_S = 2.0  # a stall may be this much longer than monitor or heartbeats show
# a blocked rank has saved its stack, and a snapshot of the others, by then
_TIME_TO_TELL_S = 3.0
_HEARTBEAT_STOPPED_S = 3.0


@dataclass(frozen=True)
class Timing:
    """The times of a job."""

    exits: Exits
    stall_s: float

    @property
    def by_rank(self) -> dict[int, RankCalls]:
        return self.exits.by_rank

    @property
    def seen_ns(self) -> int | None:
        """The wall clock when the job was last seen alive, if it was."""
        return self.exits.now_ns

    @property
    def is_live(self) -> bool:
        """Whether the verdict is as of a moment at which the job was alive: now, or the last one
        that a monitor saw or a heartbeat shows."""
        return self.seen_ns is not None

    @property
    def is_over(self) -> bool:
        """Whether no process of the job is known to be alive."""
        return self.exits.is_over

    @cached_property
    def recorded_ns(self) -> int:
        """The time of the newest record of any box."""
        return max((self._recorded_ns(rank) for rank in self.by_rank), default=0)

    @cached_property
    def now_ns(self) -> int | None:
        """The last time the job was alive; a record proves that its rank was."""
        return max(self.seen_ns, self.recorded_ns) if self.seen_ns is not None else None

    @property
    def end_ns(self) -> int:
        """The last time the job was alive; if that is unknown, the newest record."""
        return self.recorded_ns if self.now_ns is None else self.now_ns

    def _recorded_ns(self, rank: int) -> int:
        """When a rank last recorded something, apart from being ended from outside."""
        rank_calls = self.by_rank[rank]
        if not self.exits.was_ended_externally(rank):
            return rank_calls.box_summary.last_ns
        return rank_calls.issued_ns(*rank_calls.last) if rank_calls.last is not None else 0

    def since_s(self, t_ns: int) -> float | None:
        """Seconds from a time to the last time the job was alive; None if that is unknown."""
        return (self.now_ns - t_ns) / 1e9 if self.now_ns is not None else None

    # -- waits -------------------------------------------------------------------------------------

    def began_ns(self, wait: Wait) -> int:
        """When a wait began; 0 if the ring has lost that.

        A CPU may issue calls long before its device reaches them. If the device has not reached the
        call, or that is not known, the wait did not begin before the last place of the device.
        """
        rank_calls = self.by_rank[wait.rank]
        issued_ns = rank_calls.issued_ns(*wait.call)
        if not issued_ns:
            return 0
        return rank_calls.reached_ns(*wait.call) or max(issued_ns, rank_calls.device_moved_ns)

    def waited_s(self, wait: Wait) -> float | None:
        began_ns = self.began_ns(wait)
        return self.since_s(began_ns) if began_ns else None

    def recorded_s(self, wait: Wait) -> float:
        """How long a wait had lasted at the last record of any box: a lower bound."""
        return (self.recorded_ns - self.began_ns(wait)) / 1e9

    def is_stalled(self, wait: Wait) -> bool:
        """Whether a wait has lasted too long.

        If the job is over and nothing shows since when, every wait may have. If that is known, the
        wait is compared with the pace of the job: it cannot be given more time.
        """
        waited = self.waited_s(wait)
        if waited is None:
            return True
        patience = self.patience_s(wait.rank, wait.key)
        # flight recorder dumps come without processes, and are written when something is wrong
        if not self.is_over or not self.exits.statuses:
            return waited >= patience
        # A rank without data may have arrived, and the others may have continued: after this time,
        # their stacks would show it.
        least = _TIME_TO_TELL_S if not wait.missing else 0.0
        return waited >= max(patience, least, ENDED_AGAIN * self.paused_s(wait))

    # -- patience ----------------------------------------------------------------------------------

    def patience_s(self, rank: int, key: StreamKey | None = None) -> float:
        """How long a wait may last.

        A job that is over cannot be given more time: ten times the usual interval, but at least
        `ENDED_S`, or half of `stall_s` if that is less. A healthy job pauses too, to save or to
        evaluate.
        """
        if not self.is_over:
            return self.stall_s
        least = min(ENDED_S, self.stall_s / 2)
        return max(least, min(self.stall_s - _UNSEEN_S, self._usual_s(rank, key) * _UNUSUAL))

    def unusual_s(self, rank: int) -> float:
        """How long a rank must be in a collective to count as blocked after a mismatch."""
        return min(self.stall_s, self._usual_s(rank) * _UNUSUAL) if self.is_live else 0.0

    def was_moving(self) -> bool:
        """Whether a job that is over was still recording when it was last seen."""
        lasted = self.since_s(self.recorded_ns)
        if lasted is None or not self.by_rank:
            return False
        return lasted < min(map(self.patience_s, self.by_rank))

    def silent_s(self, rank: int) -> float:
        """How long before the end of a job that is over the heartbeat of a rank had stopped: its
        process could not run. 0 if the heartbeat lasted, or if that is unknown."""
        rank_calls = self.by_rank[rank]
        beat_ns = rank_calls.box_summary.beat_ns
        if not self.is_over or not beat_ns or rank_calls.end is not None:
            return 0.0
        earlier_s = self.since_s(beat_ns) or 0.0
        return earlier_s if earlier_s >= _HEARTBEAT_STOPPED_S else 0.0

    @cached_property
    def unable_to_run(self) -> frozenset[int]:
        """Ranks whose process cannot run, or could not before it was ended: it is stopped, or had
        no heartbeat. NCCL sends data from threads of the process, so its collectives cannot
        complete."""
        return frozenset(
            rank
            for rank in self.by_rank
            if self.exits.status(rank).is_stopped
            or (self.silent_s(rank) and not self.exits.is_dead(rank))
        )

    def paused_s(self, wait: Wait) -> float:
        """The longest time between an earlier call at the same call site and the next one:
        saving or evaluating may take as long each time."""
        calls = self.by_rank[wait.rank].calls.get(wait.key)
        at = calls.at(wait.number) if calls is not None else None
        if calls is None or not at:
            return 0.0
        alike = np.flatnonzero(calls.codes()[:at] == calls.codes()[at])
        return float(np.diff(calls.times_ns()[: at + 1])[alike].max(initial=0)) / 1e9

    def _usual_s(self, rank: int, key: StreamKey | None = None) -> float:
        """Median seconds between two collectives of a rank, at least 0.1. If the stream has too
        few calls, that of its busiest stream."""
        streams = self.by_rank[rank].calls
        calls = streams.get(key) if key is not None else None
        if calls is None or len(calls) < 2:
            calls = max(streams.values(), key=len, default=None)
        if calls is None or len(calls) < 2:
            return 1.0
        return max(0.1, float(np.median(np.diff(calls.times_ns()))) / 1e9)

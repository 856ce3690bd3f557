"""Finds stragglers.

Ranks are stragglers if the job loses a large part of its time waiting for them, repeatedly, and for
no other rank nearly as much. Time counts: 50 ms in every step, or half a second in every tenth.
Several ranks may be stragglers (a slow host), as long as they are the minority. On a crowded
machine any rank is late now and then: the same ranks must be late so often that chance hardly
explains it, and still be late.

Arrivals are compared by the clocks of the hosts, aligned as well as possible: a rank is late
against ranks of other hosts only by much more than the clock error. A rank that may be late because
it lacks a CPU is named only after a longer time (`lateness.py`). The verdict is `inferred`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.calls.stream_calls import CallWindow
from torchwhere.diagnose.clocks.host_clocks import UNALIGNED, HostClocks
from torchwhere.diagnose.doctor.lateness import (
    CpuContention,
    Lost,
    Trust,
    by_one_clock,
    cpu_contention,
    lost,
)
from torchwhere.diagnose.doctor.lost_between import Moment, lost_between
from torchwhere.diagnose.doctor.stack_samples import SampledPlace
from torchwhere.diagnose.doctor.waits_elsewhere import may_have_waited_ns, waited_ns

_ROUNDS = 50  # examined at the end of the run; then twice as many, and so on
_COST = 0.15  # share of the job's time; less is not reported
_ALWAYS = (
    # of the rounds. A rank that is late less often must cost more, for longer: on a crowded
    # machine any rank may be late for a while
    0.9
)
# (of four ranks on two busy cores one was measured to cost up to 0.25 of three seconds)
_COST_AT_TIMES = 0.3
_LONG_NS = 5e9
_CROWDED_NS = 30e9  # if all ranks of a host lack CPUs
_LATE_NS = 2_000_000
_TIMES_AS_LATE = 2.0  # compared with the next rank
_CHANCE = 1e-5  # of a false alarm, if all ranks are late equally often
_MOST_OF_IT = 0.8  # of all lost time: the larger delays
_PAUSE = 4  # times as long as usual between two delays: after that, lateness counts as new
_ASKED = 16  # delays of a rank that are checked for another cause


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks that are late repeatedly."""

    rank: int  # the one that costs the most
    ranks: tuple[int, ...]  # all of them
    late_s: float  # median delay
    share: float  # of the job's time lost by waiting for them
    steps: int  # late in this many of `of_steps`
    of_steps: int
    since_step: int | None
    after: Moment | None  # the last thing it did before the time was lost
    before: Moment | None  # the collective it was late at
    phase: str | None
    # share of the time in which it waited for a CPU; None if unknown
    queued: float | None = None
    lacks_cpu: bool = False  # whether that may be why it is late
    unsure_s: float = 0.0  # about how far the host clocks may be off
    group: str | None = None  # whose collectives are counted if no steps are
    since_number: int | None = None  # the first of them
    on_device: bool = False  # the device comes late to the collectives, not the CPU
    sampled: SampledPlace | None = None  # where its stack was while it was late

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ranks": list(self.ranks)}


def straggler(
    job_calls: JobCalls,
    *,
    key: StreamKey | None = None,
    align_clocks: Callable[[], HostClocks] = lambda: UNALIGNED,
    trusts_cpus: bool = True,
) -> Straggler | None:
    """The ranks that are late, in all groups or in one. The details are those of the costliest.

    `align_clocks` is called only if a group has ranks on several hosts. Without `trusts_cpus`, a
    rank also counts as late if its CPU came late to calls of its device, and took no longer than
    the others between two calls: these may have waited for their devices.
    """
    candidates = [*job_calls.windows(), *(job_calls.longer_windows() if job_calls.stale else ())]
    whole = [
        window for window in candidates if window.key.source == -1 and key in (None, window.key)
    ]
    by_group = (_late_in(job_calls, window, align_clocks, trusts_cpus) for window in whole)
    late_groups = [late for late in by_group if late is not None]
    if not late_groups:
        return None
    worst = max(late_groups, key=lambda late: late.share)
    rows = {
        late.window.ranks[row]: None
        for late in late_groups
        if 2 * late.share >= worst.share
        for row in late.rows
    }
    return _straggler(job_calls, worst, tuple(sorted(rows)))


class _Late(NamedTuple):
    """The ranks of one group that are late, the worst first."""

    window: CallWindow
    rows: tuple[int, ...]
    share: float
    lost: Lost
    first: int  # the first round that was examined
    rounds: npt.NDArray[np.float64]  # ns, what each rank lost in each round
    is_late: npt.NDArray[np.bool_]  # the worst of them, in each round
    doubt_ns: float
    cpu_contention: CpuContention | None = None

    @property
    def is_on_device(self) -> bool:
        """Whether the device of the worst is late, rather than its CPU."""
        return self.lost.is_on_device(self.rows[0], self.first)

    @property
    def elapsed_ns(self) -> float:
        return float(self.lost.starts[-1] - self.lost.starts[self.first])

    @property
    def columns(self) -> tuple[int, int]:
        """First and last column of the window that were examined."""
        return int(self.lost.columns[self.lost.begins[self.first]]), int(self.lost.columns[-1])


def _late_in(
    job_calls: JobCalls,
    window: CallWindow,
    align_clocks: Callable[[], HostClocks],
    trusts_cpus: bool,
) -> _Late | None:
    by_own_clocks = window
    window, trust = by_one_clock(job_calls, window, align_clocks)
    losses = lost(window, waits="gloo" in (job_calls.group(window.key).backend or "gloo"))
    if losses is not None and not trusts_cpus:
        losses = losses.with_late_cpus()
    for late in _late_in_rounds(window, trust, losses) if losses is not None else ():
        rows = tuple(row for row in late.rows if not _is_dragged(job_calls, late, row))
        if not rows:
            return None
        late = late._replace(rows=rows)
        if late.is_on_device:
            return late
        crowded = cpu_contention(job_calls, by_own_clocks, rows[0], columns=late.columns, late=rows)
        if late.elapsed_ns >= _long_enough_ns(crowded, late.share):
            return late._replace(cpu_contention=crowded)
    return None


def _long_enough_ns(crowded: CpuContention | None, share: float) -> float:
    """How long a rank must be late if CPU contention may be the cause: the scheduler soon picks
    another rank."""
    if crowded is None or not crowded.explains(share):
        return 0.0
    return _CROWDED_NS if crowded.is_host_wide else _LONG_NS


def _late_in_rounds(window: CallWindow, trust: Trust, losses: Lost) -> Iterator[_Late]:
    """The late ranks in the last rounds, in twice as many, and so on."""
    count = losses.rounds.shape[1]
    lengths = (
        *takewhile(lambda length: length < count, (_ROUNDS << doubled for doubled in range(20))),
        count,
    )
    tried = (_late_since(window, trust, losses, count - length) for length in lengths)
    return (late for late in tried if late is not None)


def _late_since(window: CallWindow, trust: Trust, losses: Lost, first: int) -> _Late | None:
    """The ranks that are late from round `first` on, if it is not chance."""
    all_rounds = losses.since(first)
    rounds, elapsed = all_rounds[:, first:], float(losses.starts[-1] - losses.starts[first])
    rows = _the_latest(rounds.sum(axis=1), least=_COST * elapsed)
    if not rows or elapsed <= 0:  # dumps may have no times
        return None
    others = np.delete(rounds, rows, axis=0).max(axis=0)
    costs = (rounds[list(rows)].max(axis=0) - others).clip(min=0)
    share = float(costs.sum()) / elapsed
    least = max(_LATE_NS, _COST * elapsed / rounds.shape[1])
    is_late = all_rounds[rows[0]] >= least
    is_always = bool(is_late[first:].mean() >= _ALWAYS)
    is_much = share >= _COST if is_always else share >= _COST_AT_TIMES and elapsed >= _LONG_NS
    if not is_much or not _goes_on(is_late[first:]):
        return None
    if not _is_not_chance(rounds, rows, is_always=is_always):
        return None
    if _moves_around(all_rounds, rows, first):
        return None
    late_ns = np.median(rounds[:, is_late[first:]], axis=1)
    sure = tuple(row for row in rows if trust.is_beyond_doubt(row, late_ns, least_ns=least))
    doubt_ns = max((trust.doubt_ns(row) or 0.0 for row in sure), default=0.0)
    if not sure:
        return None
    return _Late(window, sure, share, losses, first, all_rounds, is_late, doubt_ns)


def _the_latest(totals: npt.NDArray[np.float64], *, least: float) -> tuple[int, ...]:
    """The rows that are far later than the rest (fewer than half), latest first."""
    order = np.argsort(-totals, kind="stable")
    most = max(1, (len(totals) - 1) // 2)
    sizes = totals[order]
    many = np.flatnonzero(sizes[:most] >= least)
    if not len(many):
        return ()
    gaps = sizes[many] / sizes[many + 1].clip(min=1)
    best = int(gaps.argmax())
    return tuple(order[: best + 1].tolist()) if gaps[best] >= _TIMES_AS_LATE else ()


def _goes_on(is_late: npt.NDArray[np.bool_]) -> bool:
    """Whether the time since the last delay is not much longer than the usual interval."""
    late = np.flatnonzero(is_late)
    return len(late) > 1 and len(is_late) - int(late[-1]) <= _PAUSE * max(
        1.0, float(np.median(np.diff(late)))
    )


def _is_not_chance(
    rounds: npt.NDArray[np.float64], rows: tuple[int, ...], *, is_always: bool
) -> bool:
    """Whether the same ranks are last more often than chance allows.

    Chernoff bound, over all choices of this many ranks. Only the larger delays count, which make
    most of the lost time. If a rank is not always late, consecutive delays count as one: other work
    on a core lasts for a while.
    """
    worst, latest = rounds.max(axis=0), rounds.argmax(axis=0)
    order = np.argsort(-worst, kind="stable")
    sums = np.cumsum(worst[order])
    large = np.sort(order[: int(np.searchsorted(sums, _MOST_OF_IT * sums[-1])) + 1])
    if not is_always:
        goes_on = (np.diff(large, prepend=-2) == 1) & (np.diff(latest[large], prepend=-1) == 0)
        large = large[~goes_on]
    count, share = len(large), float(np.isin(latest[large], rows).mean())
    chance = len(rows) / len(rounds)
    if share <= chance:
        return False
    entropy = share * math.log(share / chance) + (
        (1 - share) * math.log((1 - share) / (1 - chance)) if share < 1 else 0.0
    )
    choices = (
        math.lgamma(len(rounds) + 1)
        - math.lgamma(len(rows) + 1)
        - math.lgamma(len(rounds) - len(rows) + 1)
    )
    return choices - count * entropy <= math.log(_CHANCE)


def _moves_around(rounds: npt.NDArray[np.float64], rows: tuple[int, ...], first: int) -> bool:
    """Whether two other ranks (of two ranks, the other one) had a similar stretch before: then
    it moves around."""
    length = rounds.shape[1] - first
    sums = np.cumsum(np.delete(rounds[:, :first], rows, axis=0), axis=1)
    if sums.shape[1] <= length:
        return False
    stretches = (sums[:, length:] - sums[:, :-length]).max(axis=1)
    return int((2 * stretches >= rounds[rows[0], first:].sum()).sum()) >= min(2, len(sums))


# -- rank, place, first round ----------------------------------------------------------------------


def _straggler(job_calls: JobCalls, late: _Late, ranks: tuple[int, ...]) -> Straggler:
    row, losses = late.rows[0], late.lost
    chosen = late.first + np.flatnonzero(late.is_late[late.first :])
    since = int(losses.labels[_since(late)])
    after, before, phase = lost_between(job_calls, late.window, row, losses.latest(row, chosen))
    return Straggler(
        rank=late.window.ranks[row],
        ranks=ranks,
        late_s=float(np.median(late.rounds[row, chosen])) / 1e9,
        share=late.share,
        steps=len(chosen),
        of_steps=late.rounds.shape[1] - late.first,
        since_step=since if losses.has_steps else None,
        after=after,
        before=before,
        phase=phase,
        queued=late.cpu_contention.own if late.cpu_contention is not None else None,
        lacks_cpu=late.cpu_contention is not None and late.cpu_contention.explains(late.share),
        unsure_s=late.doubt_ns / 1e9,
        group=None if losses.has_steps else job_calls.group(late.window.key).title,
        since_number=None if losses.has_steps else since,
        on_device=late.is_on_device,
    )


def _since(late: _Late) -> int:
    """The round since which a rank is late, without a long pause, as far back as the data goes."""
    rounds = np.flatnonzero(late.is_late)
    between = np.diff(rounds)
    recent = between[rounds[:-1] >= late.first]
    usual = max(1.0, float(np.median(recent))) if len(recent) else 1.0
    pauses = np.flatnonzero(between > _PAUSE * usual)
    return int(rounds[int(pauses[-1]) + 1 if len(pauses) else 0])


def _is_dragged(job_calls: JobCalls, late: _Late, row: int) -> bool:
    """Whether a rank was late because it waited for another rank, in another group or for a
    message. If that rank has no data, a wait as long as this one was late is possible."""
    window, losses = late.window, late.lost
    in_time = [other for other in range(len(window.ranks)) if other not in late.rows]
    in_time_ranks, others = [window.ranks[other] for other in in_time], in_time[:_ASKED]
    columns = [
        column
        for column in losses.latest(row, np.flatnonzero(late.is_late)[-_ASKED:])
        if column > 0
    ]
    came_ns = RankCalls.issued_ns if losses.late_issue is None else RankCalls.reached_ns
    dragged = 0
    for column in columns:
        own_ns = waited_ns(job_calls, window, row, column, came_ns)
        lost_ns = float(losses.calls[row, int(np.searchsorted(losses.columns, column))])
        if own_ns >= lost_ns / 2:  # unless the others waited as long and still came in time
            own_ns -= float(
                np.median(
                    [waited_ns(job_calls, window, other, column, came_ns) for other in others]
                )
            )
        unseen_ns = may_have_waited_ns(
            job_calls, window, row, column, came_ns, in_time=in_time_ranks
        )
        dragged += max(own_ns, unseen_ns) >= lost_ns / 2
    return 2 * dragged > len(columns)

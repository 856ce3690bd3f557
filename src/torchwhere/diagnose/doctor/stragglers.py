"""How fast a job goes, and which ranks hold it back.

Ranks are stragglers if the job loses a good part of its time waiting for them, again and again, and
for none of the others nearly as much. Time is what counts: 50 ms in every step, or half a second in
every tenth. They may be several (a slow host), as long as they are fewer than the others. That
somebody is late now and then is chance, on a crowded machine: it must be these same ranks so often
that chance would hardly ever do it, and still go on.

Arrivals are compared by the clocks of the ranks' hosts, aligned as far as can be: against ranks of
other hosts one is called late only by much more than those can be off (`one_clock.py`). Who may be
late for want of a CPU (`crowding.py`) is named only after a good while. The verdict is `inferred`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.core.place import shown
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.calls.job_calls import StreamCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import JobCalls, RankCalls
from torchwhere.diagnose.doctor.common_clock import Trust, by_one_clock
from torchwhere.diagnose.doctor.cpu_contention import CpuContention, cpu_contention
from torchwhere.diagnose.doctor.lateness import Lost, lost
from torchwhere.diagnose.doctor.mismatch import CallWindow, longer_windows, windows
from torchwhere.diagnose.doctor.waits import members

_ROUNDS = 50  # the last so many are looked at; where that does not suffice twice as many, and so on
_COST = 0.15  # of its time, that a job loses: less is not worth a name
_ALWAYS = (
    # of the rounds. Who is late less often must cost more, for longer: on a crowded machine anyone
    # may be for a while
    0.9
)
# (of four ranks on two busy cores one was measured to cost up to 0.25 of three seconds)
_COST_AT_TIMES = 0.3
_LONG_NS = 5e9
_CROWDED_NS = 30e9  # where all ranks of a host lack CPUs
_LATE_NS = 2_000_000
_TIMES_AS_LATE = 2.0  # as the next of the others
_CHANCE = 1e-5  # of a false alarm, where anyone is late as often as any other
_MOST_OF_IT = 0.8  # of all time lost is what the larger delays make
_PAUSE = 4  # times as long as usual between two delays: after that, lateness counts as new
_ASKED = 16  # delays of a rank, to find who made it late
_CALLS = 50  # the last so many make the pace of a job without steps


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps a second, and how far it has come; of a job that counts no steps, collectives a
    second."""

    steps_per_s: float | None
    last_step: int | None
    collectives_per_s: float | None = None

    def __str__(self) -> str:
        if self.steps_per_s is None and self.collectives_per_s is not None and not self.last_step:
            counted = "One step" if self.last_step == 0 else "No step"
            return f"{counted} has been counted; {self.collectives_per_s:.3g} collectives/s."
        if self.last_step is None:
            return "No step has been counted yet."
        pace = f", {self.steps_per_s:.3g} steps/s" if self.steps_per_s else ""
        return f"Last step {self.last_step}{pace}."

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks that are late again and again."""

    rank: int  # the one that costs the most
    ranks: tuple[int, ...]  # all of them
    late_s: float  # at a time, the median
    share: float  # of the job's time, that it loses waiting for them
    steps: int  # in so many of `of_steps` it was late
    of_steps: int
    since_step: int | None
    after: str | None  # the last thing it did before the time was lost
    before: str | None  # the collective it was late at
    phase: str | None
    # the share of the time for which it waited for a CPU; None if that is not known
    queued: float | None = None
    lacks_cpu: bool = False  # whether it may be late for that
    unsure_s: float = 0.0  # by about so much the clocks of its host and of others may be off
    group: str | None = None  # whose collectives are counted where no steps are, and
    since_number: int | None = None  # the first of them

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ranks": list(self.ranks)}


def pace(job_calls: JobCalls) -> Pace:
    said = [rank_calls.rank_summary for rank_calls in job_calls.by_rank.values()]
    rates = [each.steps_per_s for each in said if each.steps_per_s is not None]
    last = max((each.last_step for each in said if each.last_step is not None), default=None)
    if rates:
        return Pace(float(np.median(rates)), last)
    calls = [
        rate
        for rank_calls in list(job_calls.by_rank.values())[:_CALLS]
        if (rate := _calls_per_s(rank_calls)) is not None
    ]
    return Pace(None, last, float(np.median(calls)) if calls else None)


def _calls_per_s(rank_calls: RankCalls) -> float | None:
    """Collectives a second, lately."""
    times = [calls.times_ns()[-_CALLS:] for calls in rank_calls.calls.values()]
    latest = np.sort(np.concatenate(times))[-_CALLS:] if times else np.empty(0, np.int64)
    lasted = int(latest[-1] - latest[0]) if len(latest) > 1 else 0
    return (len(latest) - 1) * 1e9 / lasted if lasted > 0 else None


def straggler(job_calls: JobCalls, *, key: StreamKey | None = None) -> Straggler | None:
    """The ranks that are late, in all groups or in one. The most is told of the one that costs
    most."""
    known = [*windows(job_calls), *(longer_windows(job_calls) if job_calls.past else ())]
    whole = [window for window in known if window.key.source == -1 and key in (None, window.key)]
    found = [late for window in whole if (late := _late_in(job_calls, window)) is not None]
    if not found:
        return None
    worst = max(found, key=lambda late: late.share)
    rows = {
        late.window.ranks[row]: None
        for late in found
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
    first: int  # the round from which on was looked
    is_late: npt.NDArray[np.bool_]  # the worst of them, in each round
    doubt_ns: float
    cpu_contention: CpuContention | None = None

    @property
    def elapsed_ns(self) -> float:
        return float(self.lost.starts[-1] - self.lost.starts[self.first])

    @property
    def columns(self) -> tuple[int, int]:
        """From which to which number of the window was looked."""
        return int(self.lost.columns[self.lost.begins[self.first]]), int(self.lost.columns[-1])


def _late_in(job_calls: JobCalls, window: CallWindow) -> _Late | None:
    by_own_clocks = window
    window, trust = by_one_clock(job_calls, window)
    found = lost(window, waits="gloo" in (job_calls.group(window.key).backend or "gloo"))
    for late in _late_in_rounds(window, trust, found) if found is not None else ():
        rows = tuple(row for row in late.rows if not _is_dragged(job_calls, late, row))
        if not rows:
            return None
        crowded = cpu_contention(job_calls, by_own_clocks, rows[0], columns=late.columns, late=rows)
        if late.elapsed_ns >= _long_enough_ns(crowded, late.share):
            return late._replace(rows=rows, cpu_contention=crowded)
    return None


def _long_enough_ns(crowded: CpuContention | None, share: float) -> float:
    """How long a rank must be late, if it may be for want of a CPU: whom the scheduler lets wait
    changes, mostly soon."""
    if crowded is None or not crowded.explains(share):
        return 0.0
    return _CROWDED_NS if crowded.is_everybodys else _LONG_NS


def _late_in_rounds(window: CallWindow, trust: Trust, found: Lost) -> Iterator[_Late]:
    """In the last rounds, in twice as many, and so on."""
    count = found.rounds.shape[1]
    lengths = (
        *takewhile(lambda length: length < count, (_ROUNDS << doubled for doubled in range(20))),
        count,
    )
    tried = (_late_since(window, trust, found, count - length) for length in lengths)
    return (late for late in tried if late is not None)


def _late_since(window: CallWindow, trust: Trust, found: Lost, first: int) -> _Late | None:
    """Who is late in the rounds from the first one on, if it is no chance."""
    rounds, elapsed = found.rounds[:, first:], float(found.starts[-1] - found.starts[first])
    rows = _the_latest(rounds.sum(axis=1), least=_COST * elapsed)
    if not rows:
        return None
    others = np.delete(rounds, rows, axis=0).max(axis=0)
    costs = (rounds[list(rows)].max(axis=0) - others).clip(min=0)
    share = float(costs.sum()) / elapsed
    least = max(_LATE_NS, _COST * elapsed / rounds.shape[1])
    is_late = found.rounds[rows[0]] >= least
    is_always = bool(is_late[first:].mean() >= _ALWAYS)
    is_much = share >= _COST if is_always else share >= _COST_AT_TIMES and elapsed >= _LONG_NS
    if (
        not is_much
        or not _goes_on(is_late[first:])
        or not _is_no_chance(rounds, rows, is_always=is_always)
    ):
        return None
    if _others_had_it_too(found.rounds, rows, first):
        return None
    late_ns = np.median(rounds[:, is_late[first:]], axis=1)
    sure = tuple(row for row in rows if trust.is_beyond_doubt(row, late_ns, least_ns=least))
    doubt_ns = max((trust.doubt_ns(row) or 0.0 for row in sure), default=0.0)
    return _Late(window, sure, share, found, first, is_late, doubt_ns) if sure else None


def _the_latest(totals: npt.NDArray[np.float64], *, least: float) -> tuple[int, ...]:
    """The rows that are far later than all others, fewer than half of them, the latest first."""
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
    """Whether the last delay is not much longer ago than there is between two."""
    late = np.flatnonzero(is_late)
    return len(late) > 1 and len(is_late) - int(late[-1]) <= _PAUSE * max(
        1.0, float(np.median(np.diff(late)))
    )


def _is_no_chance(
    rounds: npt.NDArray[np.float64], rows: tuple[int, ...], *, is_always: bool
) -> bool:
    """Whether these would hardly be the latest so often if anyone was as often as any other: by
    Chernoff's bound, for all choices of so many ranks together. Only the larger delays are counted,
    which make most of the time lost; of somebody who is not always late, those in a row as one:
    whatever else a core has to do, it does for a while."""
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


def _others_had_it_too(rounds: npt.NDArray[np.float64], rows: tuple[int, ...], first: int) -> bool:
    """Whether two others (of two ranks, the other one) have had a stretch like this before: then it
    goes around."""
    length = rounds.shape[1] - first
    sums = np.cumsum(np.delete(rounds[:, :first], rows, axis=0), axis=1)
    if sums.shape[1] <= length:
        return False
    stretches = (sums[:, length:] - sums[:, :-length]).max(axis=1)
    return int((2 * stretches >= rounds[rows[0], first:].sum()).sum()) >= min(2, len(sums))


# -- who, where, since when ------------------------------------------------------------------------


def _straggler(job_calls: JobCalls, late: _Late, ranks: tuple[int, ...]) -> Straggler:
    row, found = late.rows[0], late.lost
    chosen = late.first + np.flatnonzero(late.is_late[late.first :])
    since = int(found.labels[_since(late)])
    after, before, phase = _where(job_calls, late.window, row, found.latest(row, chosen))
    return Straggler(
        rank=late.window.ranks[row],
        ranks=ranks,
        late_s=float(np.median(found.rounds[row, chosen])) / 1e9,
        share=late.share,
        steps=len(chosen),
        of_steps=found.rounds.shape[1] - late.first,
        since_step=since if found.has_steps else None,
        after=after,
        before=before,
        phase=phase,
        queued=late.cpu_contention.own if late.cpu_contention is not None else None,
        lacks_cpu=late.cpu_contention is not None and late.cpu_contention.explains(late.share),
        unsure_s=late.doubt_ns / 1e9,
        group=None if found.has_steps else job_calls.group(late.window.key).title,
        since_number=None if found.has_steps else since,
    )


def _since(late: _Late) -> int:
    """The round since which a rank is late, with no long pause in between, as far back as can be
    looked at."""
    rounds = np.flatnonzero(late.is_late)
    between = np.diff(rounds)
    usual = (
        max(1.0, float(np.median(between[rounds[:-1] >= late.first])))
        if (rounds[:-1] >= late.first).any()
        else 1.0
    )
    pauses = np.flatnonzero(between > _PAUSE * usual)
    return int(rounds[int(pauses[-1]) + 1 if len(pauses) else 0])


def _is_dragged(job_calls: JobCalls, late: _Late, row: int) -> bool:
    """Whether a rank came late because it waited for somebody else, in another group or for a
    message."""
    window, found = late.window, late.lost
    others = [other for other in range(len(window.ranks)) if other not in late.rows][:_ASKED]
    columns = [
        column for column in found.latest(row, np.flatnonzero(late.is_late)[-_ASKED:]) if column > 0
    ]
    dragged = 0
    for column in columns:
        more = _waited_ns(job_calls, window, row, column)
        lost_ns = float(found.calls[row, int(np.searchsorted(found.columns, column))])
        if more >= lost_ns / 2:  # as long as nobody else waited as long, and came in time
            more -= float(
                np.median([_waited_ns(job_calls, window, other, column) for other in others])
            )
        dragged += more >= lost_ns / 2
    return 2 * dragged > len(columns)


def _waited_ns(job_calls: JobCalls, window: CallWindow, row: int, column: int) -> float:
    """How long a rank waited, at most, in calls of other streams, since its call before this
    one."""
    number, own, rank = window.first + column, window.calls[row], window.ranks[row]
    span, said = (own.record(number - 1), own.record(number)), job_calls.by_rank[rank]
    waited = 0
    for key, calls in said.calls.items():
        for number in _between(calls, span) if key != window.key else ():
            others = [job_calls.by_rank[other] for other in _others(job_calls, key, rank)]
            last = max((other.issued_ns(key, number) for other in others), default=0)
            waited += max(0, last - said.issued_ns(key, number))
    return waited


def _others(job_calls: JobCalls, key: StreamKey, rank: int) -> Iterator[int]:
    ends = (
        members(job_calls, key) if key.source == key.destination else (key.source, key.destination)
    )
    return (other for other in ends if other != rank and other in job_calls.by_rank)


def _between(calls: StreamCalls, span: tuple[int, int]) -> range:
    """The numbers of a stream that were issued between two records."""
    low, high = (_first_after(calls, record) for record in span)
    return range(low, high)


def _first_after(calls: StreamCalls, record: int) -> int:
    low, high = calls.first, calls.last + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if calls.record(middle) <= record else (low, middle)
    return low


def _where(
    job_calls: JobCalls, window: CallWindow, row: int, columns: list[int]
) -> tuple[str | None, str | None, str | None]:
    """Between which two of its own records a late rank loses its time, most often, and in which
    phase."""
    box, calls = job_calls.by_rank[window.ranks[row]].box, window.calls[row]
    seen: Counter[tuple[str, str, str | None]] = Counter()
    for column in columns if box is not None else ():
        assert box is not None
        number = window.first + column
        span = calls.record(max(number - 1, calls.first)), calls.record(number)
        begin, at = (int(index) for index in np.searchsorted(box.records["number"], span))
        gaps = np.diff(box.records["t_ns"][begin : at + 1].astype(np.int64))
        if not len(gaps) or at >= len(box.records):
            continue
        end = begin + int(gaps.argmax()) + 1
        earlier, later = box.event(end - 1), box.event(end)
        seen[
            _said(earlier),
            _said(later),
            earlier.fields.get("phase") if earlier.kind == "phase_begin" else None,
        ] += 1
    return seen.most_common(1)[0][0] if seen else (None, None, None)


def _said(event: Any) -> str:
    what = event.fields.get("op") or event.fields.get("phase") or event.kind
    where = (
        f" in {event.place.pass_} of {shown(event.place.module)}"
        if event.place.module is not None
        else ""
    )
    return f"{what}{where}" + (f" at {event.place.line}" if event.place.line else "")


def sentences(found: Straggler) -> tuple[str, ...]:
    who, is_are = ranks_phrase(found.ranks).capitalize(), "are" if len(found.ranks) > 1 else "is"
    rounds = "steps" if found.group is None else f'collectives of group "{found.group}"'
    since = f"step {found.since_step}" if found.group is None else f"#{found.since_number}"
    late = (
        f"{found.late_s * 1e3:.3g} ms in {found.steps} of the last {found.of_steps} {rounds},"
        f" since {since}"
    )
    by = (
        f" The host clocks were aligned to about {found.unsure_s * 1e3:.2g} ms."
        if found.unsure_s
        else ""
    )
    said = f"{who} {is_are} late by {late}: this costs the job {found.share:.0%} of its time.{by}"
    if found.lacks_cpu:
        who = "It" if len(found.ranks) == 1 else f"Rank {found.rank}"
        said += (
            f" {who} waited for a CPU {found.queued:.0%} of the time: something else runs on the"
            " CPUs it may use."
        )
    if not found.after or not found.before:
        return (said,)
    one = "It" if len(found.ranks) == 1 else f"Rank {found.rank}, for example,"
    lost = (
        f"{one} loses the time in phase {found.phase}, "
        if found.phase
        else f"{one} loses the time "
    )
    return said, f"{lost}between {found.after} and {found.before}."

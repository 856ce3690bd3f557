"""How fast a job goes, and which rank holds it back.

A rank is a straggler if, step after step, it is the last to reach a collective of its group, by a good part of a step, and no
other rank is nearly as late. Arrivals are compared by the wall clock of the ranks' hosts: between hosts whose clocks differ by
more than that, a straggler may be missed or wrong, and a verdict says `inferred`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.doctor.mismatch import Window, windows
from torchwhere.diagnose.hearing.testimony import Hearing
from torchwhere.place import shown

_STEPS = 50  # the last so many are looked at
_FEWEST_STEPS = 8
_PAUSE = 4  # steps on time, after which lateness counts as new
_SHARE = 0.9  # of these steps it is the last: on a crowded machine anyone is, now and then
_LATE_SHARE = 0.15  # of a step
_LATE_NS = 2_000_000
_MOST_TIMES = 1 << 22  # that are compared at once


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps a second, and how far it has come."""

    steps_per_s: float | None
    last_step: int | None

    def __str__(self) -> str:
        if self.last_step is None:
            return "No step has been counted yet."
        pace = f", {self.steps_per_s:.3g} steps/s" if self.steps_per_s else ""
        return f"Last step {self.last_step}{pace}."

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Straggler:
    """One rank that is late again and again."""

    rank: int
    late_s: float  # a step, the median
    share: float  # of a step
    steps: int  # in so many of `of_steps` it was the last
    of_steps: int
    since_step: int
    after: str | None  # the last thing it did before the time was lost
    before: str | None  # the collective it was late at
    phase: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def pace(hearing: Hearing) -> Pace:
    said = [testimony.statement for testimony in hearing.testimonies.values()]
    rates = [each.steps_per_s for each in said if each.steps_per_s is not None]
    last = max((each.last_step for each in said if each.last_step is not None), default=None)
    return Pace(float(np.median(rates)) if rates else None, last)


def straggler(hearing: Hearing) -> Straggler | None:
    whole = [window for window in windows(hearing) if window.key.source == -1]
    found = [late for window in whole if (late := _straggler_in(hearing, window)) is not None]
    return max(found, key=lambda late: late.late_s, default=None)


def _straggler_in(hearing: Hearing, window: Window) -> Straggler | None:
    late = _lateness(window)
    if late is None:
        return None
    least = max(_LATE_NS, _LATE_SHARE * late.step_ns)
    is_late = (late.worst >= least) & (late.worst >= 2 * _second(late.worst))
    row = int(is_late.sum(axis=1).argmax())
    count = int(is_late[row].sum())
    if count < _SHARE * len(late.steps) or not is_late[row][-3:].any():
        return None
    since = _since(window, row, late)
    late_ns = float(np.median(late.worst[row][is_late[row]]))
    after, before, phase = _where(hearing, window, row, late.latest_of(window, row, is_late[row]))
    share = late_ns / max(late.step_ns, 1.0)
    return Straggler(window.ranks[row], late_ns / 1e9, share, count, len(late.steps), since, after, before, phase)


def _since(window: Window, row: int, late: _Lateness) -> int:
    """The step since which a rank is late, with at most a few on time in between, as far back as can be looked at."""
    per_step = max(1, len(late.columns) // len(late.steps))
    longer = _lateness(window, most=max(_STEPS, _MOST_TIMES // (len(window.ranks) * per_step)))
    longer = longer if longer is not None else late
    is_late = longer.worst[row] >= max(_LATE_NS, _LATE_SHARE * longer.step_ns)
    steps = np.flatnonzero(is_late)
    pauses = np.flatnonzero(np.diff(steps) > _PAUSE)
    return int(longer.steps[steps[int(pauses[-1]) + 1 if len(pauses) else 0]])


@dataclass(frozen=True, slots=True)
class _Lateness:
    """How late each rank was in each step, at its worst: against the middle of its group, or of two, against the other."""

    steps: npt.NDArray[np.int64]
    step_ns: float  # the median length of a step
    worst: npt.NDArray[np.float64]  # one row a rank, one column a step
    columns: npt.NDArray[np.int64]  # of the window, step by step
    begins: npt.NDArray[np.int64]  # of each step, among these columns
    usual_ns: npt.NDArray[np.int64]  # when each of these columns was issued, by the middle or by the first two ranks

    def latest_of(self, window: Window, row: int, chosen: npt.NDArray[np.bool_]) -> list[int]:
        """The numbers at which a rank was the latest, of each of the chosen steps."""
        times = window.calls[row].times_ns(window.first, window.end)[self.columns] - _zero_ns(window)
        late = times - (self.usual_ns[1 - row] if self.usual_ns.ndim == 2 else self.usual_ns)
        ends = [*self.begins[1:].tolist(), len(self.columns)]
        spans = [(begin, end) for begin, end, is_chosen in zip(self.begins.tolist(), ends, chosen, strict=True) if is_chosen]
        return [window.first + int(self.columns[begin + int(late[begin:end].argmax())]) for begin, end in spans]


def _lateness(window: Window, *, most: int = _STEPS) -> _Lateness | None:
    """Of the last so many steps."""
    steps = window.steps[0]
    chosen = np.unique(steps)[1:-1][-most:]  # the first makes and compiles things, the last may not be over
    if len(chosen) < _FEWEST_STEPS:
        return None
    order = np.argsort(steps, kind="stable")
    begin, end = np.searchsorted(steps[order], [chosen[0], chosen[-1] + 1])
    columns = order[begin:end]
    begins = np.searchsorted(steps[columns], chosen)
    ends = [*begins[1:].tolist(), len(columns)]
    worst, usual, starts = [], [], []
    # A few steps at a time: all times of a large group at once would be hundreds of megabytes.
    for some in np.array_split(np.arange(len(chosen)), min(len(chosen), 1 + len(window.ranks) * len(columns) // _MOST_TIMES)):
        low, high = int(begins[some[0]]), ends[some[-1]]
        times = _times(window, columns[low:high])
        middle = times[::-1] if len(window.ranks) == 2 else np.median(times, axis=0)
        cuts = begins[some] - low
        worst.append(np.maximum.reduceat(times - middle, cuts, axis=1))
        starts.append(np.minimum.reduceat(times.min(axis=0), cuts))
        usual.append(times if len(window.ranks) == 2 else middle.astype(np.int64))
    step_ns = float(np.median(np.diff(np.concatenate(starts))))
    return _Lateness(
        chosen, step_ns, np.concatenate(worst, axis=1).astype(np.float64), columns, begins, np.concatenate(usual, axis=-1)
    )


def _times(window: Window, columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """When each rank issued some of the numbers."""
    low, high = window.first + int(columns.min()), window.first + int(columns.max()) + 1
    chosen = columns - columns.min()
    return np.stack([calls.times_ns(low, high)[chosen] for calls in window.calls]) - _zero_ns(window)


def _zero_ns(window: Window) -> int:
    """What times count from: those of today's wall clock are too large for a float to hold a microsecond."""
    return int(window.calls[0].times_ns(window.first, window.first + 1)[0])


def _second(worst: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each step, how late the next rank is for each: the largest lateness of the others, at least 0."""
    best = np.sort(worst, axis=0)
    others: npt.NDArray[np.float64] = np.where(worst == best[-1], best[-2], best[-1])
    return others.clip(min=0)


def _where(hearing: Hearing, window: Window, row: int, numbers: list[int]) -> tuple[str | None, str | None, str | None]:
    """Between which two of its own records a late rank loses its time, most often, and in which phase."""
    box = hearing.testimonies[window.ranks[row]].box
    seen: Counter[tuple[str, str, str | None]] = Counter()
    for number in numbers if box is not None else ():
        assert box is not None
        at = int(np.searchsorted(box.records["number"], window.calls[row].record(number)))
        gaps = np.diff(box.records["t_ns"][max(0, at - 64) : at + 1].astype(np.int64))
        if not len(gaps):
            continue
        end = max(0, at - 64) + int(gaps.argmax()) + 1
        earlier, later = box.event(end - 1), box.event(end)
        seen[_said(earlier), _said(later), earlier.fields.get("phase") if earlier.kind == "phase_begin" else None] += 1
    return seen.most_common(1)[0][0] if seen else (None, None, None)


def _said(event: Any) -> str:
    what = event.fields.get("op") or event.fields.get("phase") or event.kind
    where = f" in {event.place.pass_} of {shown(event.place.module)}" if event.place.module is not None else ""
    return f"{what}{where}" + (f" at {event.place.line}" if event.place.line else "")


def sentences(found: Straggler) -> tuple[str, ...]:
    lost = f"It loses the time in phase {found.phase}, " if found.phase else "It loses the time "
    late = f"{found.late_s * 1e3:.3g} ms a step ({found.share:.0%} of it)"
    often = f"in {found.steps} of the last {found.of_steps} steps, since step {found.since_step}"
    said = f"Rank {found.rank} is late by {late}, {often}."
    return (said, f"{lost}between {found.after} and {found.before}.") if found.after and found.before else (said,)

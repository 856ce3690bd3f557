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

from torchwhere.diagnose.mismatch import Window, windows
from torchwhere.diagnose.testimony import Hearing
from torchwhere.events import Kind
from torchwhere.place import shown

_STEPS = 50  # the last so many are looked at
_FEWEST_STEPS = 8
_SHARE = 0.9  # of these steps it is the last: on a crowded machine anyone is, now and then
_LATE_SHARE = 0.15  # of a step
_LATE_NS = 2_000_000


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
    rates, last = [], None
    for testimony in hearing.testimonies.values():
        records = testimony.box.records
        begins = records[records["kind"] == int(Kind.STEP_BEGIN)]
        if len(begins):
            last = max(int(begins["step"][-1]), last or 0)
        recent = begins["t_ns"][-_STEPS:].astype(np.int64)
        if len(recent) > 1 and recent[-1] > recent[0]:
            rates.append((len(recent) - 1) * 1e9 / float(recent[-1] - recent[0]))
    return Pace(float(np.median(rates)) if rates else None, last)


def straggler(hearing: Hearing) -> Straggler | None:
    whole = [window for window in windows(hearing) if window.key.source == -1 and len(window.ranks) > 1]
    found = [late for window in whole if (late := _straggler_in(hearing, window)) is not None]
    return max(found, key=lambda late: late.late_s, default=None)


def _straggler_in(hearing: Hearing, window: Window) -> Straggler | None:
    times = _times(hearing, window)
    steps = window.steps[0]
    lateness = times - (times[::-1] if len(window.ranks) == 2 else np.median(times, axis=0))
    chosen = np.unique(steps)[1:-1][-_STEPS:]  # the first makes and compiles things, the last may not be over
    if len(chosen) < _FEWEST_STEPS:
        return None
    length = np.median(np.diff([times[:, steps == step].min() for step in chosen]))
    worst = np.stack([lateness[:, steps == step].max(axis=1) for step in chosen], axis=1)
    least = max(_LATE_NS, _LATE_SHARE * float(length))
    late = (worst >= least) & (worst >= 2 * _second(worst))
    row = int(late.sum(axis=1).argmax())
    count = int(late[row].sum())
    if count < _SHARE * len(chosen) or not late[row][-3:].any():
        return None
    since = int(chosen[int(np.flatnonzero(late[row])[0])])
    late_ns = float(np.median(worst[row][late[row]]))
    columns = [int(np.flatnonzero(steps == step)[lateness[row, steps == step].argmax()]) for step in chosen[late[row]]]
    after, before, phase = _where(hearing, window, row, columns)
    return Straggler(
        window.ranks[row], late_ns / 1e9, late_ns / max(float(length), 1.0), count, len(chosen), since, after, before, phase
    )


def _second(worst: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each step, how late the next rank is for each: the largest lateness of the others, at least 0."""
    best = np.sort(worst, axis=0)
    others: npt.NDArray[np.float64] = np.where(worst == best[-1], best[-2], best[-1])
    return others.clip(min=0)


def _times(hearing: Hearing, window: Window) -> npt.NDArray[np.float64]:
    """When each rank issued each number, in wall-clock ns since the first."""
    rows = []
    for rank in window.ranks:
        testimony = hearing.testimonies[rank]
        calls = testimony.calls[window.key]
        start = window.first - int(calls.numbers[0])
        chosen = calls.rows[start : start + window.forms.shape[1]]
        rows.append(testimony.box.records["t_ns"][chosen].astype(np.int64) + testimony.box.wall_ns(0))
    times: npt.NDArray[np.int64] = np.stack(rows)
    found: npt.NDArray[np.float64] = (times - times.min()).astype(np.float64)
    return found


def _where(hearing: Hearing, window: Window, row: int, columns: list[int]) -> tuple[str | None, str | None, str | None]:
    """Between which two of its own records a late rank loses its time, most often, and in which phase."""
    testimony = hearing.testimonies[window.ranks[row]]
    calls = testimony.calls[window.key]
    start = window.first - int(calls.numbers[0])
    seen: Counter[tuple[str, str, str | None]] = Counter()
    for column in columns:
        at = int(calls.rows[start + column])
        gaps = np.diff(testimony.box.records["t_ns"][max(0, at - 64) : at + 1].astype(np.int64))
        if not len(gaps):
            continue
        end = max(0, at - 64) + int(gaps.argmax()) + 1
        earlier, later = testimony.event(end - 1), testimony.event(end)
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

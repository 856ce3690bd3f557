"""Finds mismatches: the first number in a group at which ranks issued different calls.

A different signature (op, shape, dtype, reduction, root) is always wrong. A different call site
(same op and shapes, but another module, pass or line) is wrong only if it is a deviation: ranks of
a correct program may reach one collective from different lines, but then they do so every time. A
deviation is a call site that most of the others use at another number, or one at a position of the
step where all ranks agreed in the step before and the others still do. What all ranks do for the
first time is not a deviation. An unknown place (`CallSite.compared`) equals any other, and steps
are compared only where the step of a call is deterministic.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from torchwhere.core.place import Pass, line_fields
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.stream_calls import CallWindow

_NEARBY = 64  # calls before and after that are searched for a swapped call
_TIMES = 3  # earlier agreements that are required if no steps are counted


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks that issued different calls at one number, in cohorts, the largest first."""

    key: StreamKey
    number: int
    cohorts: tuple[tuple[int, ...], ...]
    aspect: Literal["signature", "call_site", "step"]
    # if the largest cohort is not unique: ranks that changed since the step before
    deviated: tuple[int, ...] = ()
    has_new_op: bool = False  # they deviated by an op that they had not issued in the group before
    is_own_call: bool = False  # they deviated by a call that only the user's own code can issue
    is_outvoted: bool = False  # they deviated from other groups of the same kind

    @property
    def culprits(self) -> tuple[int, ...]:
        """The smaller cohorts. If the largest is not unique, the ranks that deviated from their
        own earlier calls; else all."""
        if len(self.cohorts) > 1 and len(self.cohorts[0]) == len(self.cohorts[1]):
            if self.deviated:
                return self.deviated
            return tuple(sorted(rank for cohort in self.cohorts for rank in cohort))
        return tuple(sorted(rank for cohort in self.cohorts[1:] for rank in cohort))

    @property
    def is_certain(self) -> bool:
        return len(self.cohorts) < 2 or len(self.cohorts[0]) > len(self.cohorts[1])

    @property
    def is_tie(self) -> bool:
        """Whether nothing shows which cohort is wrong."""
        return not self.is_certain and not self.deviated


def mismatches(job_calls: JobCalls) -> list[Mismatch]:
    """The first difference of each stream."""
    first_differences = []
    for window in [*job_calls.windows(), *job_calls.longer_windows()]:
        differences = (
            _in_signature(job_calls, window),
            _in_call_site(job_calls, window),
            _in_step(window),
        )
        differing = [mismatch for mismatch in differences if mismatch is not None]
        # the first difference causes the rest; at the same number, the signature says most
        if differing:
            first_differences.append(min(differing, key=lambda mismatch: mismatch.number))
    return first_differences


def _in_signature(job_calls: JobCalls, window: CallWindow) -> Mismatch | None:
    if len(window.heads) == 1:
        return None
    differs = np.flatnonzero((window.signature_ids != window.signature_ids[0]).any(axis=0))
    if not len(differs):
        return None
    column = int(differs[0])
    mismatch = _mismatch(window, column, window.signature_ids, "signature")
    if mismatch.is_certain or mismatch.deviated:
        return mismatch
    # DDP rebuilds its buckets after the first step, so all ranks issue new shapes there.
    novel = window.members_of(_has_new_op(job_calls, window, column))
    if 0 < len(novel) < len(window.ranks):
        return replace(mismatch, deviated=tuple(sorted(novel)), has_new_op=True)
    # The code of torch and of a framework is the same on all ranks. A branch on the rank is in the
    # user's own code.
    own = window.members_of(_is_own_call(job_calls, window, column))
    if 0 < len(own) < len(window.ranks):
        return replace(mismatch, deviated=tuple(sorted(own)), is_own_call=True)
    return mismatch


def _has_new_op(job_calls: JobCalls, window: CallWindow, column: int) -> npt.NDArray[np.bool_]:
    """For each class, whether it issued an op that it had not issued in the window before. All
    false at the first call, where everything is new.

    If rings have lost the beginning, an op is only new after calls that have all been repeated.
    """
    signature_of = job_calls.shared_ids.signature_ids

    def op(number: int) -> str | None:
        signature = signature_of[number]
        return signature[0] if signature is not None else None

    rows = window.signature_ids[:, : column + 1].tolist()
    has_new = [
        op(row[-1]) not in {None, *map(op, set(row[:-1]))}
        and (window.first == 0 or min(Counter(row[:-1]).values(), default=0) > 1)
        for row in rows
    ]
    return np.array(has_new) & (column > 0)


def _is_own_call(job_calls: JobCalls, window: CallWindow, column: int) -> npt.NDArray[np.bool_]:
    """For each class, whether the user's own code issued the call, outside any module. All false if
    a call site is not known."""
    sites = [
        job_calls.shared_ids.site_ids[number] for number in window.site_ids[:, column].tolist()
    ]
    if None in sites:
        return np.zeros(len(sites), np.bool_)
    return np.array(
        [
            (module, pass_, beneficiary) == (None, Pass.OUTSIDE, None)
            and line_fields(line)["framework_line"] is None
            for module, pass_, line, beneficiary in sites
        ]
    )


def _undamaged(job_calls: JobCalls, window: CallWindow) -> CallWindow | None:
    """The window without ranks that have lost names: an unreadable place is not a different
    place."""
    damaged = {
        rank for rank in window.ranks if job_calls.by_rank[rank].box_summary.counts.torn_entries
    }
    return window.without(damaged) if damaged else window


def _in_call_site(job_calls: JobCalls, whole: CallWindow) -> Mismatch | None:
    window = _undamaged(job_calls, whole)
    if window is None or len(window.heads) == 1 or window.key.is_p2p:
        return None
    if _takes_turns(window):
        return None
    earlier: set[bytes] = set()  # a pattern that occurred before is not a fault
    for column in map(int, window.differs):
        pattern = window.site_ids[:, column].tobytes()
        is_new = pattern not in earlier
        earlier.add(pattern)
        deviates = _is_out_of_turn(window, column) or (
            is_new and _deviates(job_calls, window, column)
        )
        if deviates and not _is_barrier(job_calls, window, column):
            # A rank with an unknown call site counts as usual.
            values = np.where(window.site_ids > 0, window.site_ids, window.usuals[column])
            return _mismatch(window, column, values, "call_site")
    return None


def _in_step(window: CallWindow) -> Mismatch | None:
    """Ranks that were in the same step at one number and are not at a later one: a rank skipped a
    call, or made an extra one.

    Ranks that never agreed count their steps differently, which is allowed. Ranks that ran out of
    input in a `Join` have lower step counts from then on.
    """
    if len(window.heads) == 1 or window.key.is_p2p:
        return None
    ahead = window.steps != window.steps[0]
    if not ahead.any():
        return None
    columns = np.flatnonzero(window.has_steps & ~np.maximum.accumulate(window.is_shadow))
    differs = ahead[:, columns].any(axis=0)
    if not differs.any() or differs[:1].any() or (~differs).sum() < 2:
        return None
    return _mismatch(window, int(columns[int(differs.argmax())]), window.steps, "step")


def _mismatch(
    window: CallWindow,
    column: int,
    values: npt.NDArray[np.int64],
    aspect: Literal["signature", "call_site", "step"],
) -> Mismatch:
    cohorts = window.cohorts(values[:, column])
    deviated: tuple[int, ...] = ()
    if len(cohorts) > 1 and len(cohorts[0]) == len(cohorts[1]):
        has = _has_changed_length if aspect == "step" else _has_deviated
        deviated = window.members_of(
            np.array([has(window, row, column, values) for row in range(len(window.heads))])
        )
    is_clear = 0 < len(deviated) < len(window.ranks)
    return Mismatch(
        window.key,
        window.first + column,
        cohorts,
        aspect,
        tuple(sorted(deviated)) if is_clear else (),
    )


def _has_deviated(window: CallWindow, row: int, column: int, values: npt.NDArray[np.int64]) -> bool:
    """Whether a class issued something else at the same position of the step before; without
    steps, whether it never issued this before.

    If rings have lost the beginning, what another class issues too is not new.
    """
    earlier = _a_step_before(window, row, column)
    if earlier is not None:
        return bool(values[row, earlier] != values[row, column])
    known = values[row, :column] if window.first == 0 else np.delete(values, column, axis=1)
    return column > 0 and not bool((known == values[row, column]).any())


def _has_changed_length(
    window: CallWindow, row: int, column: int, _values: npt.NDArray[np.int64]
) -> bool:
    """Whether the step of the mismatch has another number of calls, for this class, than the
    step before."""
    steps, step = window.steps[row], int(window.steps[:, column].min())
    last = int(steps[column])
    this, before = int((steps == step).sum()), int((steps == step - 1).sum())
    is_whole = last > step or int(steps[-1]) > step
    return before > 0 and (this != before if is_whole else this > before)


def _takes_turns(window: CallWindow) -> bool:
    """Whether most ranks differ from the others at some number: they take turns, as when each
    broadcasts to all."""
    odd = np.zeros(len(window.heads), np.bool_)
    for column in map(int, window.differs[:_NEARBY]):
        odd |= window.odd_at(column)
    return len(window.ranks) > 2 and int(window.sizes[odd].sum()) > len(window.ranks) / 2


def _is_out_of_turn(window: CallWindow, column: int) -> bool:
    """Whether a rank issues here what most issue nearby, and nearby what most issue here."""
    span = slice(max(0, column - _NEARBY), column + _NEARBY)
    odd = window.odd_at(column)
    has_usual = (window.site_ids[odd, span] == window.usuals[column]).any(axis=1)
    is_usual_nearby = np.isin(window.site_ids[odd, column], window.usuals[span])
    return bool((has_usual & is_usual_nearby).any())


def _deviates(job_calls: JobCalls, window: CallWindow, column: int) -> bool:
    """Whether a rank deviates from what all ranks did before."""
    return _had_agreed(window, column) and not _is_first_ranks_own(job_calls, window, column)


def _had_agreed(window: CallWindow, column: int) -> bool:
    """Whether all ranks agreed the last time this was issued, and at least half of them still do
    the same."""
    if window.steps[0][0] == window.steps[0][-1]:
        earlier = _last_times(window, column)
    else:
        before = _a_step_before(window, 0, column)
        earlier = [before] if before is not None else []
    if not earlier or not all(map(window.agrees_at, earlier)):
        return False
    did = int(window.usuals[earlier[-1]])
    as_before = (window.site_ids[:, column] == did) | (window.site_ids[:, column] == 0)
    return did > 0 and int(window.sizes[as_before].sum()) * 2 >= len(window.ranks)


def _a_step_before(window: CallWindow, row: int, column: int) -> int | None:
    """The column at the same position of the step before; None if there is none, or steps are
    unreliable."""
    steps = window.steps[row]
    this, before = (
        np.flatnonzero(steps == steps[column]),
        np.flatnonzero(steps == steps[column] - 1),
    )
    position = column - int(this[0])
    # the first of the window may be cut off
    if not len(before) or position >= len(before) or before[0] == 0:
        return None
    return int(before[position]) if window.has_steps[before[0] : column + 1].all() else None


def _last_times(window: CallWindow, column: int) -> list[int]:
    """In a job without steps: earlier columns where most ranks issued this after the same call
    as here."""
    usuals = window.usuals
    if column == 0:
        return []
    earlier = 1 + np.flatnonzero(
        (usuals[1:column] == usuals[column]) & (usuals[: column - 1] == usuals[column - 1])
    )
    return earlier[-_TIMES:].tolist() if len(earlier) >= _TIMES else []


def _is_first_ranks_own(job_calls: JobCalls, window: CallWindow, column: int) -> bool:
    """Whether only the first rank took another line, in the same module, for one call, and all
    ranks agreed after it.

    The first rank often logs or prints in a branch of its own.
    """
    odd = window.members_of(window.odd_at(column))
    if odd != (min(window.ranks),) or len(window.ranks) == 2:
        return False
    own, usual = (
        job_calls.shared_ids.site_ids[int(number)]
        for number in set(window.site_ids[:, column].tolist()) - {0}
    )
    if (*own[:2], own[3]) != (*usual[:2], usual[3]):
        return False
    after = column + 1
    return after == window.signature_ids.shape[1] or (
        window.agrees_at(after)
        and bool((window.signature_ids[:, after] == window.signature_ids[0, after]).all())
    )


def _is_barrier(job_calls: JobCalls, window: CallWindow, column: int) -> bool:
    signature_id = job_calls.shared_ids.signature_ids[int(window.signature_ids[0, column])]
    return signature_id is not None and "barrier" in signature_id[0]

"""Where ranks part: the first number in a group at which they issued something different.

Different in form (op, shape, dtype, reduction, root) is wrong by itself. Different in meaning (the
same op and shapes, but of another module, pass or line) is wrong where it is a departure: ranks of
a sound program may well reach one collective from different lines, but then they do so every time.
A departure is a meaning that most of the others have too, at another number, or one at a position
of the step where all ranks agreed in the step before, and the others still do as they did then.
What all do for the first time, they do together: nobody departs. A place that says nothing
(`CallSite.compared`) is like any other, and a step is compared only where it is no chance in which
one a call came.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.calls import job_calls as issued
from torchwhere.diagnose.calls.job_calls import StreamCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import JobCalls
from torchwhere.diagnose.doctor.waits import has_lost_its_newest, members

_NEARBY = 64  # numbers around one in which a swapped call is looked for
_TIMES = 3  # that all agreed, where no steps are counted


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks that issued something different at one number, in cohorts, the largest first."""

    key: StreamKey
    number: int
    cohorts: tuple[tuple[int, ...], ...]
    what: Literal["signature", "call_site", "step"]
    # where none is larger than the others: who did otherwise in the step before
    deviated: tuple[int, ...] = ()

    @property
    def culprits(self) -> tuple[int, ...]:
        """The smaller cohorts. Where none is larger than the others, those that departed from their
        own ways; else all."""
        if len(self.cohorts) > 1 and len(self.cohorts[0]) == len(self.cohorts[1]):
            if self.deviated:
                return self.deviated
            return tuple(sorted(rank for cohort in self.cohorts for rank in cohort))
        return tuple(sorted(rank for cohort in self.cohorts[1:] for rank in cohort))

    @property
    def is_certain(self) -> bool:
        return len(self.cohorts) < 2 or len(self.cohorts[0]) > len(self.cohorts[1])


@dataclass(frozen=True)
class CallWindow:
    """The numbers of a stream that all its ranks still have. Ranks that issued the same there, step
    for step, are a class."""

    key: StreamKey
    ranks: tuple[int, ...]
    calls: tuple[StreamCalls, ...]  # of each rank
    first: int
    end: int
    classes: npt.NDArray[np.int64]  # of each rank
    # of each class, the first of its ranks (an index); classes are in this order
    heads: tuple[int, ...]

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        return np.bincount(self.classes)

    @cached_property
    def _whats(self) -> npt.NDArray[np.uint64]:
        return np.stack([self.calls[head].packed_ids(self.first, self.end) for head in self.heads])

    @cached_property
    def signature_ids(self) -> npt.NDArray[np.int64]:
        """One row a class, one column a number."""
        return issued.signature_ids(self._whats)

    @cached_property
    def site_ids(self) -> npt.NDArray[np.int64]:
        return issued.site_ids(self._whats)

    @cached_property
    def steps(self) -> npt.NDArray[np.int64]:
        return np.stack([self.calls[head].steps(self.first, self.end) for head in self.heads])

    @cached_property
    def _in_step(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        pairs = [self.calls[head].in_step(self.first, self.end) for head in self.heads]
        is_counted, is_shadow = (np.stack(each) for each in zip(*pairs, strict=True))
        shadows: npt.NDArray[np.bool_] = np.logical_or.reduce(is_shadow)
        return np.logical_and.reduce(is_counted) & ~shadows, shadows

    @property
    def has_steps(self) -> npt.NDArray[np.bool_]:
        """Of each number, whether it is no chance in which step it was issued, on any rank."""
        return self._in_step[0]

    @property
    def is_shadow(self) -> npt.NDArray[np.bool_]:
        """Of each number, whether some rank issued it in the name of one that is out of input."""
        return self._in_step[1]

    @cached_property
    def differs(self) -> npt.NDArray[np.int64]:
        """The columns in which ranks mean something different. A place that says nothing (0)
        differs from none."""
        low = np.where(self.site_ids > 0, self.site_ids, np.iinfo(np.int64).max).min(axis=0)
        return np.flatnonzero(low < self.site_ids.max(axis=0))

    @cached_property
    def usuals(self) -> npt.NDArray[np.int64]:
        """Of each column, the meaning that most ranks have."""
        found: npt.NDArray[np.int64] = self.site_ids.max(axis=0)
        for column in self.differs.tolist():
            found[column] = self.usual(self.site_ids[:, column])
        return found

    def odd_at(self, column: int) -> npt.NDArray[np.bool_]:
        """The classes that mean something else than most ranks do."""
        here = self.site_ids[:, column]
        odd: npt.NDArray[np.bool_] = (here != self.usuals[column]) & (here > 0)
        return odd

    def agrees_at(self, column: int) -> bool:
        here = self.site_ids[:, column]
        return bool(((here == here.max()) | (here == 0)).all())

    def members_of(self, rows: npt.NDArray[np.bool_]) -> tuple[int, ...]:
        """The ranks of some classes."""
        return tuple(
            rank
            for rank, number in zip(self.ranks, self.classes.tolist(), strict=True)
            if rows[number]
        )

    def cohorts(self, values: npt.NDArray[Any]) -> tuple[tuple[int, ...], ...]:
        """Ranks by the value of their class, the largest cohort first."""
        by_value: dict[int, list[int]] = {}
        for rank, value in zip(self.ranks, values[self.classes].tolist(), strict=True):
            by_value.setdefault(value, []).append(rank)
        return tuple(
            tuple(cohort)
            for cohort in sorted(by_value.values(), key=lambda cohort: (-len(cohort), cohort[0]))
        )

    def usual(self, values: npt.NDArray[Any]) -> int:
        """The meaning that most ranks have; of several, that of the first rank."""
        counts: dict[int, int] = {}
        for value, size in zip(values.tolist(), self.sizes.tolist(), strict=True):
            if value:
                counts[value] = counts.get(value, 0) + size
        return max(counts, key=lambda value: counts[value])


def windows(job_calls: JobCalls) -> list[CallWindow]:
    """One for each stream of which two or more ranks have a stretch in common, less those that are
    all alike by their form."""
    if "windows" not in job_calls.kept:
        by_stream: dict[StreamKey, list[tuple[int, StreamCalls]]] = {}
        for rank, said in job_calls.by_rank.items():
            for key, calls in said.calls.items():
                by_stream.setdefault(key, []).append((rank, calls))
        found = (_window(job_calls, key, by_stream[key]) for key in sorted(by_stream))
        job_calls.kept["windows"] = [window for window in found if window is not None]
    kept: list[CallWindow] = job_calls.kept["windows"]
    return kept


def _window(
    job_calls: JobCalls, key: StreamKey, said: list[tuple[int, StreamCalls]]
) -> CallWindow | None:
    taking_part = frozenset(members(job_calls, key))
    said = [(rank, calls) for rank, calls in said if rank in taking_part]
    if len(said) < 2:
        return None
    ranks, calls = zip(*said, strict=True)
    if (
        key.source != key.destination and calls[0].signature_id == calls[1].signature_id >= 0
    ):  # all these messages are of one form
        return None
    first = max(each.first for each in calls)
    end = min(each.last for each in calls) + 1
    if first >= end:
        return None
    known: dict[bytes, int] = {}
    heads: list[int] = []
    classes = np.empty(len(calls), np.int64)
    for index, each in enumerate(calls):
        content = _content(each, first, end, is_message=key.source != key.destination)
        number = classes[index] = known.setdefault(content, len(known))
        if number == len(heads):
            heads.append(index)
    return CallWindow(key, ranks, calls, first, end, classes, tuple(heads))


def longer_windows(job_calls: JobCalls) -> Iterator[CallWindow]:
    """Windows without ranks whose newest calls are lost, in a box that was cut or is gone: such a
    one ends the window for all, and may end it before the difference that the others show."""
    lost = {
        rank
        for rank, said in job_calls.by_rank.items()
        if rank in job_calls.past or has_lost_its_newest(said)
    }
    keys = {key for rank in lost for key in job_calls.by_rank[rank].calls}
    for key in sorted(keys):
        said = [
            (rank, each.calls[key])
            for rank, each in job_calls.by_rank.items()
            if rank not in lost and key in each.calls
        ]
        window = _window(job_calls, key, said)
        if window is not None:
            yield window


def _content(calls: StreamCalls, first: int, end: int, *, is_message: bool) -> bytes:
    """What is compared. Sender and receiver are in different places by nature: of a message, only
    the form."""
    packed_ids = calls.packed_ids(first, end)
    return (
        issued.signature_ids(packed_ids).tobytes()
        if is_message
        else packed_ids.tobytes() + calls.steps(first, end).tobytes()
    )


def mismatches(job_calls: JobCalls) -> list[Mismatch]:
    """The first difference of each stream."""
    found = []
    for window in [*windows(job_calls), *longer_windows(job_calls)]:
        differences = (_in_form(window), _in_meaning(job_calls, window), _in_step(window))
        known = [mismatch for mismatch in differences if mismatch is not None]
        # what came first is the cause of the rest; of what came at once, the form says most
        if known:
            found.append(min(known, key=lambda mismatch: mismatch.number))
    return found


def _in_form(window: CallWindow) -> Mismatch | None:
    if len(window.heads) == 1:
        return None
    differs = np.flatnonzero((window.signature_ids != window.signature_ids[0]).any(axis=0))
    if not len(differs):
        return None
    column = int(differs[0])
    return _mismatch(window, column, window.signature_ids, "signature")


def _undamaged(job_calls: JobCalls, window: CallWindow) -> CallWindow | None:
    """A window without ranks that have lost names: a place that cannot be read is not another
    place."""
    damaged = {rank for rank in window.ranks if job_calls.by_rank[rank].label.counts.torn_entries}
    if not damaged:
        return window
    left = [
        (rank, calls)
        for rank, calls in zip(window.ranks, window.calls, strict=True)
        if rank not in damaged
    ]
    return _window(job_calls, window.key, left)


def _in_meaning(job_calls: JobCalls, whole: CallWindow) -> Mismatch | None:
    window = _undamaged(job_calls, whole)
    if window is None or len(window.heads) == 1 or window.key.source != window.key.destination:
        return None
    if _takes_turns(window):
        return None
    seen: set[bytes] = set()  # what ranks have done before, they may do again
    for column in map(int, window.differs):
        pattern = window.site_ids[:, column].tobytes()
        is_new = pattern not in seen
        seen.add(pattern)
        departs = _is_out_of_turn(window, column) or (
            is_new and _departs(job_calls, window, column)
        )
        if departs and not _is_barrier(job_calls, window, column):
            # Whoever has no place of its own goes with the most.
            values = np.where(window.site_ids > 0, window.site_ids, window.usuals[column])
            return _mismatch(window, column, values, "call_site")
    return None


def _in_step(window: CallWindow) -> Mismatch | None:
    """Ranks that were in the same step at one number and are not at a later one: somebody left a
    call out, or made one more.

    Ranks that have never agreed count their steps differently, which is their right. Those that ran
    out of input, in a `Join`, have counted fewer ever after.
    """
    if len(window.heads) == 1 or window.key.source != window.key.destination:
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
    what: Literal["signature", "call_site", "step"],
) -> Mismatch:
    cohorts = window.cohorts(values[:, column])
    deviated: tuple[int, ...] = ()
    if len(cohorts) > 1 and len(cohorts[0]) == len(cohorts[1]):
        has = _has_changed_length if what == "step" else _has_departed
        deviated = window.members_of(
            np.array([has(window, row, column, values) for row in range(len(window.heads))])
        )
    is_clear = 0 < len(deviated) < len(window.ranks)
    return Mismatch(
        window.key,
        window.first + column,
        cohorts,
        what,
        tuple(sorted(deviated)) if is_clear else (),
    )


def _has_departed(window: CallWindow, row: int, column: int, values: npt.NDArray[np.int64]) -> bool:
    """Whether ranks of a class issued something else at the same position of their step before;
    without steps, whether they have never issued this before."""
    earlier = _a_step_before(window, row, column)
    if earlier is not None:
        return bool(values[row, earlier] != values[row, column])
    return column > 0 and not bool((values[row, :column] == values[row, column]).any())


def _has_changed_length(
    window: CallWindow, row: int, column: int, _values: npt.NDArray[np.int64]
) -> bool:
    """Whether the step in which classes part has another number of calls, for this class, than the
    one before."""
    steps, parted = window.steps[row], int(window.steps[:, column].min())
    last = int(steps[column])
    this, before = int((steps == parted).sum()), int((steps == parted - 1).sum())
    is_whole = last > parted or int(steps[-1]) > parted
    return before > 0 and (this != before if is_whole else this > before)


def _takes_turns(window: CallWindow) -> bool:
    """Whether most ranks are the odd one out at some number: each has its turn, as where everyone
    broadcasts to all."""
    odd = np.zeros(len(window.heads), np.bool_)
    for column in map(int, window.differs[:_NEARBY]):
        odd |= window.odd_at(column)
    return len(window.ranks) > 2 and int(window.sizes[odd].sum()) > len(window.ranks) / 2


def _is_out_of_turn(window: CallWindow, column: int) -> bool:
    """Whether somebody issues here what most issue nearby, and nearby what most issue here."""
    span = slice(max(0, column - _NEARBY), column + _NEARBY)
    odd = window.odd_at(column)
    has_usual = (window.site_ids[odd, span] == window.usuals[column]).any(axis=1)
    is_usual_nearby = np.isin(window.site_ids[odd, column], window.usuals[span])
    return bool((has_usual & is_usual_nearby).any())


def _departs(job_calls: JobCalls, window: CallWindow, column: int) -> bool:
    """Whether somebody does otherwise than all did before."""
    return _had_agreed(window, column) and not _is_first_ranks_own(job_calls, window, column)


def _had_agreed(window: CallWindow, column: int) -> bool:
    """Whether all ranks agreed the last time that the usual ones issued this, and these, half of
    all or more, still do."""
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
    """The column at the same position of the step before; None where there is none, or steps say
    nothing."""
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
    """Of a job that counts no steps: the columns where the usual ranks issued this before, after
    the same as here."""
    usuals = window.usuals
    if column == 0:
        return []
    found = 1 + np.flatnonzero(
        (usuals[1:column] == usuals[column]) & (usuals[: column - 1] == usuals[column - 1])
    )
    return found[-_TIMES:].tolist() if len(found) >= _TIMES else []


def _is_first_ranks_own(job_calls: JobCalls, window: CallWindow, column: int) -> bool:
    """Whether the first rank alone took another line, in the same module, for one call, and all
    went on together after it: what it writes down or prints now and then, it does in a branch of
    its own."""
    odd = window.members_of(window.odd_at(column))
    if odd != (min(window.ranks),) or len(window.ranks) == 2:
        return False
    one, other = (
        job_calls.shared_ids.site_ids.thing(int(number))
        for number in set(window.site_ids[:, column].tolist()) - {0}
    )
    if (*one[:2], one[3]) != (*other[:2], other[3]):
        return False
    after = column + 1
    return after == window.signature_ids.shape[1] or (
        window.agrees_at(after)
        and bool((window.signature_ids[:, after] == window.signature_ids[0, after]).all())
    )


def _is_barrier(job_calls: JobCalls, window: CallWindow, column: int) -> bool:
    signature_id = job_calls.shared_ids.signature_ids.thing(int(window.signature_ids[0, column]))
    return signature_id is not None and "barrier" in signature_id[0]

"""Where ranks part: the first number in a group at which they issued something different.

Different in form (op, shape, dtype, reduction, root) is wrong by itself. Different in meaning (the same op and shapes, but of
another module, pass or line) is wrong where it is a departure: ranks of a sound program may well reach one collective from
different lines, but then they do so every time. A departure is a meaning that the others have too, at another number, or one
at a position of the step where all ranks agreed in the step before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.testimony import Hearing, StreamKey
from torchwhere.diagnose.waits import members

_NEARBY = 64  # numbers around one in which a swapped call is looked for


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks that issued something different at one number, in cohorts, the largest first."""

    key: StreamKey
    number: int
    cohorts: tuple[tuple[int, ...], ...]
    what: Literal["form", "meaning", "step"]

    @property
    def culprits(self) -> tuple[int, ...]:
        """The smaller cohorts; all of them where none is larger than the others."""
        if len(self.cohorts) > 1 and len(self.cohorts[0]) == len(self.cohorts[1]):
            return tuple(sorted(rank for cohort in self.cohorts for rank in cohort))
        return tuple(sorted(rank for cohort in self.cohorts[1:] for rank in cohort))

    @property
    def is_certain(self) -> bool:
        return len(self.cohorts) < 2 or len(self.cohorts[0]) > len(self.cohorts[1])


@dataclass(frozen=True, slots=True)
class Window:
    """The numbers of a stream that all its ranks still have, and what each of them issued there: one row a rank."""

    key: StreamKey
    ranks: tuple[int, ...]
    first: int
    forms: npt.NDArray[np.int32]
    meanings: npt.NDArray[np.int32]
    steps: npt.NDArray[np.int64]


def windows(hearing: Hearing) -> list[Window]:
    """One for each stream of which two or more ranks have a stretch in common."""
    keys = sorted({key for testimony in hearing.testimonies.values() for key in testimony.calls})
    return [window for key in keys if (window := _window(hearing, key)) is not None]


def _window(hearing: Hearing, key: StreamKey) -> Window | None:
    ranks = tuple(
        rank for rank in members(hearing, key) if rank in hearing.testimonies and key in hearing.testimonies[rank].calls
    )
    calls = [hearing.testimonies[rank].calls[key] for rank in ranks]
    if len(calls) < 2:
        return None
    first = max(int(each.numbers[0]) for each in calls)
    end = min(int(each.numbers[-1]) for each in calls) + 1
    whole = [each for each in calls if each.numbers[-1] - each.numbers[0] + 1 == len(each.numbers)]
    if first >= end or len(whole) < len(calls):  # torn records leave holes: such a stream is not compared
        return None
    cuts = [slice(first - int(each.numbers[0]), end - int(each.numbers[0])) for each in calls]
    forms = np.stack([each.forms[cut] for each, cut in zip(calls, cuts, strict=True)])
    meanings = np.stack([each.meanings[cut] for each, cut in zip(calls, cuts, strict=True)])
    boxes = [hearing.testimonies[rank].box for rank in ranks]
    steps = np.stack(
        [box.records["step"][each.rows[cut]].astype(np.int64) for box, each, cut in zip(boxes, calls, cuts, strict=True)]
    )
    return Window(key, ranks, first, forms, meanings, steps)


def mismatches(hearing: Hearing) -> list[Mismatch]:
    """The first difference of each stream."""
    found = []
    for window in windows(hearing):
        differences = (_in_form(window), _in_meaning(hearing, window), _in_step(window))
        known = [mismatch for mismatch in differences if mismatch is not None]
        if known:  # what came first is the cause of the rest; of what came at once, the form says most
            found.append(min(known, key=lambda mismatch: mismatch.number))
    return found


def _in_form(window: Window) -> Mismatch | None:
    differs = np.flatnonzero((window.forms != window.forms[0]).any(axis=0))
    if not len(differs):
        return None
    column = int(differs[0])
    return Mismatch(window.key, window.first + column, _cohorts(window.ranks, window.forms[:, column]), "form")


def _in_meaning(hearing: Hearing, window: Window) -> Mismatch | None:
    if window.key.source != window.key.destination:  # sender and receiver are in different places by nature
        return None
    differs = np.flatnonzero((window.meanings != window.meanings[0]).any(axis=0))
    if _takes_turns(window, differs):
        return None
    for column in map(int, differs):
        if _departs(window, column) and not _is_barrier(hearing, window, column):
            return Mismatch(window.key, window.first + column, _cohorts(window.ranks, window.meanings[:, column]), "meaning")
    return None


def _in_step(window: Window) -> Mismatch | None:
    """Ranks that were in the same step at one number and are not at a later one: somebody left a call out, or made one more.

    Ranks that have never agreed count their steps differently, which is their right.
    """
    if window.key.source != window.key.destination:
        return None
    ahead = window.steps - window.steps[0]
    agreed = np.flatnonzero((ahead == ahead[:, :1]).all(axis=0) & (ahead[:, 0] == 0).all())
    differs = np.flatnonzero((ahead != 0).any(axis=0))
    if len(agreed) < 2 or not len(differs):
        return None
    column = int(differs[0])
    return Mismatch(window.key, window.first + column, _cohorts(window.ranks, window.steps[:, column]), "step")


def _takes_turns(window: Window, differs: npt.NDArray[np.int64]) -> bool:
    """Whether most ranks are the odd one out at some number: each has its turn, as where everyone broadcasts to all."""
    odd = set()
    for column in map(int, differs[:_NEARBY]):
        odd |= {rank for cohort in _cohorts(window.ranks, window.meanings[:, column])[1:] for rank in cohort}
    return len(window.ranks) > 2 and len(odd) > len(window.ranks) / 2


def _departs(window: Window, column: int) -> bool:
    near = window.meanings[:, max(0, column - _NEARBY) : column + _NEARBY]
    usual = Counter(window.meanings[:, column].tolist()).most_common(1)[0][0]
    here = window.meanings[:, column]
    for row in np.flatnonzero(here != usual):
        swapped = usual in near[row] and any(here[row] in near[other] for other in np.flatnonzero(here == usual))
        if swapped:
            return True
    return _agreed_a_step_before(window, column)


def _agreed_a_step_before(window: Window, column: int) -> bool:
    """Whether the same position of the step before was the same for all ranks, in a step of as many collectives."""
    steps = window.steps[0]
    this, before = np.flatnonzero(steps == steps[column]), np.flatnonzero(steps == steps[column] - 1)
    if not len(before) or column - this[0] >= len(before) or before[0] == 0:  # the first of the window may be cut off
        return False
    earlier = before[column - this[0]]
    return bool((window.meanings[:, earlier] == window.meanings[0, earlier]).all())


def _is_barrier(hearing: Hearing, window: Window, column: int) -> bool:
    form = hearing.forms.thing(int(window.forms[0, column]))
    return form is not None and "barrier" in form[0]


def _cohorts(ranks: tuple[int, ...], column: npt.NDArray[Any]) -> tuple[tuple[int, ...], ...]:
    by_value: dict[int, list[int]] = {}
    for rank, value in zip(ranks, column.tolist(), strict=True):
        by_value.setdefault(value, []).append(rank)
    return tuple(tuple(cohort) for cohort in sorted(by_value.values(), key=lambda cohort: (-len(cohort), cohort[0])))

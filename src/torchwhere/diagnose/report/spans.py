"""The run time of modules, from pairs of enter and exit records.

Takes the records of one box, gives one row for each module and pass. Calls nest within a thread.
Calls that the ring has lost or that have not ended have no time. A call inside a call of the same
module counts as part of it. Works on columns only: about 0.2 ms for a thousand records.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchwhere.core.arrays import AnyArray, Bools, Ints
from torchwhere.core.events import Kind
from torchwhere.core.place import Pass


class ModuleTimes(NamedTuple):
    """Columns with one item for each module and pass."""

    modules: list[int]  # ids of the box
    passes: list[int]
    numbers: Ints  # rows: calls, total ns, self ns, calls in complete steps


class _Nested(NamedTuple):
    """Enter and exit records sorted by thread, level and time, so that the two records of a call
    are adjacent."""

    is_enter: Bools
    # search key for the surrounding call: thread and level in the high part, order in the low part
    where: Ints
    of: Ints  # row of the records
    room: int  # size of the low part


def module_times(records: AnyArray, complete: tuple[int, int] | None) -> ModuleTimes | None:
    """The times of all modules; None without module records. `complete` is the first and the last
    complete step."""
    kinds = records["kind"]
    is_module = (kinds == int(Kind.MODULE_ENTER)) | (kinds == int(Kind.MODULE_EXIT))
    rows = records[is_module & (records["pass"] != int(Pass.SHAPE_INFERENCE))]
    if not len(rows):
        return None
    nested = _nested(rows)
    subject = rows["module"].astype(np.int64) << 8 | rows["pass"]
    keys, key_of = np.unique(subject, return_inverse=True)
    total, own = _lengths(rows, nested, subject)
    is_enter = rows["kind"] == int(Kind.MODULE_ENTER)
    first, last = complete or (1, 0)
    is_complete = is_enter & (rows["step"] >= first) & (rows["step"] <= last)
    sums = [
        np.bincount(key_of, weights, len(keys)) for weights in (is_enter, total, own, is_complete)
    ]
    return ModuleTimes(
        (keys >> 8).tolist(), (keys & 0xFF).tolist(), np.rint(np.stack(sums)).astype(np.int64)
    )


def _nested(rows: AnyArray) -> _Nested:
    threads = rows["thread"].astype(np.int64)
    by_thread = np.argsort(threads, kind="stable")
    is_enter = (rows["kind"] == int(Kind.MODULE_ENTER))[by_thread]
    # An exit is on the level of its enter: the -1 counts for the record after it.
    level = np.cumsum(np.where(is_enter, 1, -1)) + ~is_enter
    level -= level.min() - 1
    room = len(rows) + 1
    above = threads[by_thread] * (int(level.max()) + 1) + level
    order = np.argsort(above, kind="stable")
    return _Nested(is_enter[order], above[order] * room + order, by_thread[order], room)


def _lengths(rows: AnyArray, nested: _Nested, subject: Ints) -> tuple[Ints, Ints]:
    """For each enter record of a complete call: its duration, and that without the calls inside."""
    at, of = nested.where // nested.room, nested.of
    begins = np.flatnonzero(nested.is_enter[:-1] & ~nested.is_enter[1:] & (at[:-1] == at[1:]))
    enters, exits = of[begins], of[begins + 1]
    is_call = subject[enters] == subject[exits]
    begins, enters, exits = begins[is_call], enters[is_call], exits[is_call]
    times = rows["t_ns"].astype(np.int64)
    took = np.maximum(times[exits] - times[enters], 0)
    around = _around(nested)[begins]
    inside = np.zeros(len(rows), np.int64)
    has_outer = around >= 0
    np.add.at(inside, of[around[has_outer]], took[has_outer])
    total, own = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    total[enters] = np.where(_is_inside_itself(nested, subject, begins), 0, took)
    own[enters] = np.maximum(took - inside[enters], 0)
    return total, own


def _around(nested: _Nested) -> Ints:
    """For each item the index of the enter of the surrounding call; -1 without one."""
    at, order = np.divmod(nested.where, nested.room)
    outer = np.searchsorted(nested.where, (at - 1) * nested.room + order) - 1
    is_right = (outer >= 0) & (at[outer] == at - 1) & nested.is_enter[outer]
    return np.where(is_right, outer, -1)


def _is_inside_itself(nested: _Nested, subject: Ints, begins: Ints) -> Bools:
    around = _around(nested)
    own, is_inside = subject[nested.of[begins]], np.zeros(len(begins), np.bool_)
    outer = around[begins]
    while (outer >= 0).any():
        is_inside |= (outer >= 0) & (subject[nested.of[outer]] == own)
        outer = np.where(outer >= 0, around[outer], -1)
    return is_inside

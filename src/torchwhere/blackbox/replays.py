"""Finds the replay of a CUDA graph that issued a collective.

A thread writes the record of a replay and then one record for each collective of the graph. Records
of other threads may come between them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import FLAG_REPLAYED
from torchwhere.core.events import Kind

Rows = npt.NDArray[np.intp]
NO_ROW = -1


def replay_rows(box: Box) -> Rows:
    """For each record, the index of the replay that issued it; `NO_ROW` if no replay did, or if the
    ring has lost it."""
    records = box.records
    kinds, threads = records["kind"], records["thread"]
    is_replayed = (kinds == int(Kind.COLLECTIVE)) & (records["flags"] & FLAG_REPLAYED != 0)
    rows = np.full(len(records), NO_ROW, np.intp)
    for thread in np.unique(threads[is_replayed]):
        own = np.flatnonzero(threads == thread)
        is_replay = kinds[own] == int(Kind.REPLAY)
        rows[own] = np.maximum.accumulate(np.where(is_replay, own, NO_ROW))
    rows[~is_replayed] = NO_ROW
    return rows

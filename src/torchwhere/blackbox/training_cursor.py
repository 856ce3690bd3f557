"""Finds the cursor of the thread that trains, which says where a rank is.

That is not always the main thread: a worker of Ray Train runs the training function in a thread of
its own, while its main thread waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchwhere.blackbox.box import Box, Cursor
from torchwhere.core.events import Kind


def training_cursor(box: Box, cursors: Sequence[Cursor]) -> Cursor | None:
    """The cursor of the thread that trains, among the cursors of a box: it began the last step.

    Without it the cursor of the main thread, and without that one the cursor that moved last.
    """
    steps = np.flatnonzero(box.records["kind"] == int(Kind.STEP_BEGIN))
    trains = box.thread(int(box.records["thread"][steps[-1]])) if len(steps) else None
    names = [cursor.place.thread for cursor in cursors]
    thread = next((name for name in (trains, "MainThread") if name in names), None)
    found = [cursor for cursor in cursors if thread in (None, cursor.place.thread)]
    return max(found, key=lambda cursor: cursor.t_ns, default=None)

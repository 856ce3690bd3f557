"""The line of a thread that runs: from its cursor, or from its last record if that is current."""

from __future__ import annotations

from collections.abc import Sequence

from torchwhere.blackbox.file_format import (
    CALL_MASK,
    CURSOR_LINE,
    CURSOR_PLACE,
    CURSOR_TIME,
    MODULE_SHIFT,
    Record,
    pass_of,
)
from torchwhere.core.place import Pass


def live_line(cursor: Sequence[int], record: Record | None) -> int:
    """The table id of the line; 0 if it is not known.

    In backward the cursor has the line. Otherwise the line of the last record counts, unless the
    thread has entered another module since: then it belongs to an earlier place.

    Args:
        cursor: The words of the cursor.
        record: The last record of the box.
    """
    place = cursor[CURSOR_PLACE]
    if pass_of(place) == Pass.BACKWARD and cursor[CURSOR_LINE]:
        return cursor[CURSOR_LINE]
    if record is None:
        return 0
    module = place >> MODULE_SHIFT
    is_there = (module, pass_of(place)) == (record.module, record.pass_)
    is_same_call = not module or place & CALL_MASK == record.call
    has_moved = cursor[CURSOR_TIME] > record.t_ns
    return record.line if (is_there and is_same_call) or not (module and has_moved) else 0

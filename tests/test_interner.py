"""Ids for equal values and for equal rows."""

from __future__ import annotations

import numpy as np

from torchwhere.core.grouping import Interner, row_ids


def test_ids_count_up_from_the_reserved_values() -> None:
    """Equal values have equal ids, and ids lead back to the values."""
    interner = Interner[str | None]([None])
    assert [interner.id_of(value) for value in ("a", "b", "a", None)] == [1, 2, 1, 0]
    assert (list(interner), len(interner), interner[2]) == ([None, "a", "b"], 3, "b")


def test_rows_are_equal_in_all_columns() -> None:
    """Two rows have one id exactly if all their columns are equal; no rows give no ids."""
    columns = [np.array([1, 1, 2, 1, 2], np.uint8), np.array([7, 8, 7, 7, 8], np.uint64)]
    ids = row_ids(columns).tolist()
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    assert [[a == b for a in ids] for b in ids] == [[a == b for a in rows] for b in rows]
    assert row_ids([np.empty(0, np.int64)] * 2).tolist() == []

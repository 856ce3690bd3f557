"""Decodes the place word of a cursor and the flags of a record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchwhere.blackbox.file_format import (
    CALL_MASK,
    FLAG_INFERRED,
    FLAG_UNKNOWN,
    MODULE_SHIFT,
    NO_CALL,
    PASS_MASK,
    PASS_SHIFT,
)
from torchwhere.core.place import PASS_LABELS, Certainty, Pass


def pass_of(packed_place: int) -> int:
    return packed_place >> PASS_SHIFT & PASS_MASK


def cursor_place(packed_place: int, *, name: Callable[[int], str | None]) -> dict[str, Any]:
    """Pass, module, call and certainty: arguments of a `Place`. `name` looks up table ids."""
    pass_, module_id = pass_of(packed_place), packed_place >> MODULE_SHIFT
    module, call = name(module_id), packed_place & CALL_MASK
    # In a recomputation, the cursor does not hold the number of the call.
    has_call = module is not None and call != NO_CALL and pass_ != Pass.RECOMPUTE
    is_lost = pass_ not in PASS_LABELS or (module_id and module is None)
    return {
        "pass_": PASS_LABELS.get(pass_, "outside"),
        "module": module,
        "call": call if has_call else None,
        "certainty": Certainty.UNKNOWN if is_lost else Certainty.EXACT,
    }


def certainty_of(flags: int, *, is_lost: bool) -> Certainty:
    """How the place of a record is known. `is_lost`: its pass or its module cannot be read."""
    if is_lost or flags & FLAG_UNKNOWN:
        return Certainty.UNKNOWN
    return Certainty.INFERRED if flags & FLAG_INFERRED else Certainty.EXACT

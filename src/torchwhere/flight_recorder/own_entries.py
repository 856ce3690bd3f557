"""Checks the data that torchwhere adds to its own dumps: places of entries, groups.

Takes values of a dump, gives them back if they have their form, else None. The file may come from
anywhere.
"""

from __future__ import annotations

from typing import Any

from torchwhere.blackbox.file_format import COUNTER_RANKS, NO_STEP
from torchwhere.core.place import Pass
from torchwhere.flight_recorder.limits import is_number, is_shapes, is_text

_TEXTS = ("op", "raw_op", "group", "dtype", "reduce_op", "api")
PASSES = {pass_.label: pass_ for pass_ in Pass if pass_ is not Pass.SHAPE_INFERENCE}
_PLACE_TEXTS = ("module", "line", "framework_line")  # older dumps lack the last one


def _is_optional_text(value: Any) -> bool:
    return value is None or is_text(value)


def is_optional_number(value: Any) -> bool:
    """Whether a value is a step or a call number, or None."""
    return value is None or is_number(value, NO_STEP)


def own_cursor(value: Any) -> dict[str, Any] | None:
    """The current place of a rank."""
    is_sound = type(value) is dict and _is_place(value) and is_number(value.get("t_ns"))
    return value if is_sound else None


def own_call(value: Any) -> dict[str, Any] | None:
    """The call of an entry with its place."""
    if type(value) is not dict or not _is_place(value):
        return None
    of = value.get
    is_call = (
        is_text(of("op"))
        and is_text(of("group"))
        and all(_is_optional_text(of(name)) for name in _TEXTS)
        and all(is_shapes(of(name)) for name in ("shapes", "out_shapes"))
        and (of("peer") is None or is_number(of("peer"), COUNTER_RANKS))
        and is_number(of("number"))
        and is_number(of("bytes"))
        and type(of("async")) is bool
    )
    return value if is_call and _is_beneficiary(of("for")) else None


def _is_place(value: dict[str, Any]) -> bool:
    return (
        value.get("pass") in PASSES
        and all(_is_optional_text(value.get(name)) for name in _PLACE_TEXTS)
        and all(is_optional_number(value.get(name)) for name in ("step", "call"))
    )


def _is_beneficiary(value: Any) -> bool:
    return _is_optional_text(value) or (type(value) is list and all(map(is_text, value)))


def own_group(value: Any) -> dict[str, Any] | None:
    """A process group: name, ranks, and texts."""
    if type(value) is not dict or not is_text(value.get("name")):
        return None
    ranks = value.get("ranks")
    if type(ranks) is not list or not all(is_number(rank, COUNTER_RANKS) for rank in ranks):
        return None
    texts = {
        name: value.get(name) if is_text(value.get(name)) else None
        for name in ("desc", "backend", "mesh_dim")
    }
    return {"name": value["name"], "ranks": tuple(ranks), **texts}

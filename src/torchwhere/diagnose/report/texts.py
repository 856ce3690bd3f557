"""The short texts of a report: places, collectives, events; and how long a text may be.

Names come from a user's program and may hold anything. They are passed on as they are, cut at
`MOST_CHARACTERS`: whoever shows them makes them harmless.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchwhere.core.events import Event
from torchwhere.core.place import Place, shown
from torchwhere.core.rank_text import ranks_to_text
from torchwhere.core.units import amount

MOST_CHARACTERS = 300
_DETAILS = ("text", "reason", "phase", "what")


def cut(text: object) -> str:
    found = str(text)
    return found if len(found) <= MOST_CHARACTERS else found[:MOST_CHARACTERS] + "…"


def milliseconds(ns: float) -> float:
    return round(float(ns) / 1e6, 3)


def ranks_text(ranks: Iterable[int]) -> str:
    """`0-3, 8`: runs folded, cut where there are too many."""
    return cut(ranks_to_text(sorted(ranks)))


def place_text(place: Place) -> str:
    """Where, without rank and step: `backward of layers.3.mlp, train.py:50`."""
    if place.module is None and place.param is None:
        what = "outside any module" if place.pass_ == "outside" else place.pass_
    else:
        what = f"{place.pass_} of {place.param if place.param is not None else shown(place.module)}"
    return cut(f"{what}, {place.line}" if place.line else what)


def call_text(op: object, title: str, nbytes: object) -> str:
    """`all_reduce on dp (4.2 MB)`."""
    size = f" ({amount(nbytes)})" if isinstance(nbytes, int) and nbytes else ""
    return cut(f"{op} on {title}{size}")


def event_text(event: Event) -> str:
    """What an event says, beside its kind and place."""
    fields: dict[str, Any] = event.fields
    if event.kind == "collective":
        title = fields.get("mesh_dim") or fields.get("group_desc") or fields.get("group")
        return call_text(
            f"{fields.get('op')} #{fields.get('number')}", str(title), fields.get("bytes")
        )
    said = next((str(fields[name]) for name in _DETAILS if fields.get(name) is not None), "")
    return cut(said)

"""Short labels of a report for places, collectives and events, and the limit on their length.

Names come from the user's program and may hold anything. They are passed on unchanged and cut at
`MOST_CHARACTERS`: the view that shows them makes them safe.
"""

from __future__ import annotations

from typing import Any

from torchwhere.blackbox.string_table import title_in
from torchwhere.core.events import Event
from torchwhere.core.place import Place, shown
from torchwhere.core.units import amount

MOST_CHARACTERS = 300


def cut(value: object) -> str:
    text = str(value)
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"


def milliseconds(ns: float) -> float:
    return round(float(ns) / 1e6, 3)


def place_text(place: Place) -> str:
    """A place without rank and step: `backward of layers.3.mlp, train.py:50`."""
    if place.param is not None or place.module is not None:
        name = place.param if place.param is not None else shown(place.module)
        text = f"{place.pass_} of {name}"
    else:
        text = "outside any module" if place.pass_ == "outside" else place.pass_
    return cut(f"{text}, {place.full_line}" if place.line else text)


def call_text(op: object, title: str, nbytes: object) -> str:
    """`all_reduce on dp (4.2 MB)`."""
    size = f" ({amount(nbytes)})" if isinstance(nbytes, int) and nbytes else ""
    return cut(f"{op} on {title}{size}")


def event_text(event: Event) -> str:
    """The content of an event without its kind and place."""
    fields: dict[str, Any] = event.fields
    if event.kind == "collective":
        op = f"{fields.get('op')} #{fields.get('number')}"
        return call_text(op, str(title_in(fields)), fields.get("bytes"))
    return cut(event.detail)

"""What can be recorded: the kinds of event, and how an event looks as JSON.

The JSON field names are a contract (`docs/format.md`). This file knows no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torchwhere.core.place import Place
from torchwhere.core.results import Shown


class Kind(IntEnum):
    """The kinds of event; the values are those of the file format and never change their
    meaning."""

    START = 1
    END = 2
    STEP_BEGIN = 3
    STEP_END = 4
    OPTIMIZER = 5
    MODULE_ENTER = 6
    MODULE_EXIT = 7
    COLLECTIVE = 8
    NOTE = 9
    PHASE_BEGIN = 10
    PHASE_END = 11
    EXCEPTION = 12
    COMPILE_BEGIN = 13
    COMPILE_END = 14
    GROUP_BEGIN = 15
    GROUP_END = 16

    @property
    def label(self) -> str:
        return self.name.lower()


KIND_LABELS = tuple(kind.label for kind in Kind)

# Kinds whose record points at a text; the JSON field that text goes into.
TEXT_FIELD = {
    Kind.START: "text",
    Kind.END: "reason",
    Kind.NOTE: "text",
    Kind.EXCEPTION: "text",
    Kind.GROUP_BEGIN: "op",
}


def known_kinds(kinds: Iterable[str] | None) -> set[str] | None:
    """Kinds as a set; ValueError for one that there is not."""
    wanted = None if kinds is None else {kinds} if isinstance(kinds, str) else set(kinds)
    unknown = sorted(map(str, (wanted or set()) - set(KIND_LABELS)))
    if unknown:
        raise ValueError(f"there is no kind {unknown[0]!r}; there are {', '.join(KIND_LABELS)}")
    return wanted


def json_text(value: Any, *, separators: tuple[str, str] | None = None) -> str:
    """A value as JSON, on one line. NaN and infinities, which JSON does not have, become texts."""
    try:
        return json.dumps(value, allow_nan=False, separators=separators)
    except ValueError:
        return json.dumps(_finite(value), separators=separators)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True, repr=False)
class Event(Shown):
    """One recorded event: its kind, when, where, and what only this kind has."""

    kind: str
    number: int  # of the record within its box: the order of events on one rank
    t_ns: int  # wall clock of the rank's host
    place: Place
    fields: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """One JSON object. A field that came with a note and has a name of ours gets an underscore:
        nothing is lost."""
        place = self.place
        found = {
            "kind": self.kind,
            "rank": place.rank,
            "step": place.step,
            "pass": place.pass_,
            "module": place.module,
            "call": place.call,
            "line": place.line,
            "graph": place.graph,
            "thread": place.thread,
            "certainty": str(place.certainty),
            "param": place.param,
            "t_ns": self.t_ns,
        }
        return found | {
            f"{key}_" if key in found else key: value for key, value in self.fields.items()
        }

"""What can be recorded: the kinds of event, and how an event looks as JSON.

The JSON field names are a contract (`docs/format.md`). This file knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torchwhere.place import Place


class Kind(IntEnum):
    """The kinds of event; the values are those of the file format and never change their meaning."""

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

    @property
    def label(self) -> str:
        return self.name.lower()


KIND_LABELS = tuple(kind.label for kind in Kind)

# Kinds whose record points at a text; the JSON field that text goes into.
TEXT_FIELD = {Kind.START: "text", Kind.END: "reason", Kind.NOTE: "text", Kind.EXCEPTION: "text"}


@dataclass(frozen=True, slots=True)
class Event:
    """One recorded event: its kind, when, where, and what only this kind has."""

    kind: str
    number: int  # of the record within its box: the order of events on one rank
    t_ns: int  # wall clock of the rank's host
    place: Place
    fields: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """One JSON object. A field that came with a note and has a name of ours gets an underscore: nothing is lost."""
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
        return found | {f"{key}_" if key in found else key: value for key, value in self.fields.items()}

"""Recorded events: their kinds, and their form as JSON.

The JSON field names are a public contract (`docs/format.md`). This file does not import torch.
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
    """Kinds of events. The file format stores these values; they never change their meaning."""

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
    CAPTURE_BEGIN = 20
    CAPTURE_END = 21
    REPLAY = 22
    MEMORY = 24

    @property
    def label(self) -> str:
        return self.name.lower()


class SideKind(IntEnum):
    """Kinds of records that are not events: they belong to no place of the program.

    `Box.side_records` has them, and no list of events does.
    """

    STEP_TIMES = 25
    SAMPLE = 26

    @property
    def label(self) -> str:
        return self.name.lower()


KIND_LABELS = tuple(kind.label for kind in Kind)

# The fields that say most about an event, the most telling first.
DETAIL_FIELDS = ("text", "reason", "phase", "what")

# Kinds whose record is about a CUDA graph.
CUDA_GRAPH_KINDS = (Kind.CAPTURE_BEGIN, Kind.CAPTURE_END, Kind.REPLAY)

# Kinds whose record points at a text, and the JSON field that holds the text.
TEXT_FIELD = {
    Kind.START: "text",
    Kind.END: "reason",
    Kind.NOTE: "text",
    Kind.EXCEPTION: "text",
    Kind.GROUP_BEGIN: "op",
}


def known_kinds(kinds: Iterable[str] | None) -> set[str] | None:
    """Kinds as a set. Raises ValueError for an unknown kind."""
    if kinds is None:
        return None
    wanted = {kinds} if isinstance(kinds, str) else set(kinds)
    unknown = sorted(map(str, wanted - set(KIND_LABELS)))
    if unknown:
        raise ValueError(f"unknown kind {unknown[0]!r}; the kinds are {', '.join(KIND_LABELS)}")
    return wanted


def json_text(value: Any, *, separators: tuple[str, str] | None = None) -> str:
    """A value as JSON on one line. NaN and infinities become strings, as JSON has none."""
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
    """One recorded event.

    Attributes:
        kind: What happened: `collective`, `step_begin`, `note`, ...
        number: The number of its record in the box: the order of events on one rank.
        t_ns: The time by the wall clock of the rank's host, in ns since 1970.
        place: Where it happened.
        fields: The fields of its kind, for example `op` and `number` of a collective.

    Example:
        for event in torchwhere.read_run("run/").events(kinds={"collective"}):
            print(event.place, event.fields["op"])
    """

    kind: str
    number: int
    t_ns: int
    place: Place
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def detail(self) -> str:
        """The text, end reason, phase or graph of the event; empty without one."""
        return next((str(self.fields[name]) for name in DETAIL_FIELDS if self.fields.get(name)), "")

    def to_dict(self) -> dict[str, Any]:
        """Return the event as values for JSON.

        A field of the user whose name torchwhere uses gets an underscore at its end.
        """
        common = {"kind": self.kind, **self.place.to_dict(), "t_ns": self.t_ns}
        return common | {
            f"{key}_" if key in common else key: value for key, value in self.fields.items()
        }

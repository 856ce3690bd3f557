"""What a place is: the answer to "where is it?", carried by everything torchwhere keeps or prints.

A place is made in two ways: live, by `torchwhere.where()`, and from a record of a black box. Both
give the same `Place`. This file knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum

from torchwhere.core.results import Shown


class Pass(IntEnum):
    """Which part of a step is running.

    The values are those of the file format. `RECOMPUTE` is `FORWARD` with one more bit, so that the
    hot path turns a forward word into a recompute word with a single `|`. `SHAPE_INFERENCE` is a
    forward that only finds out shapes (a pipeline's metadata inference, fake tensors): it is shown
    as forward, and its calls are not counted.
    """

    OUTSIDE = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 4
    RECOMPUTE = 9
    SHAPE_INFERENCE = 13

    @property
    def label(self) -> str:
        return "forward" if self is Pass.SHAPE_INFERENCE else self.name.lower()


class Certainty(StrEnum):
    """How a place was found: read off the program, concluded from it, or not to be known."""

    EXACT = "exact"
    INFERRED = "inferred"
    UNKNOWN = "unknown"


ROOT = "<root>"
_MOST_NAME = 60  # characters of a name in a `repr`


def printable(text: str) -> str:
    """A text as a terminal may have it: names may hold anything, and none of it is obeyed."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    )


def _cut(value: object) -> object:
    if not isinstance(value, str):
        return value
    return str(value) if len(value) <= _MOST_NAME else f"{value[: _MOST_NAME - 1]}…"


def shown(module: str | None) -> str:
    """A module's name as people see it: the root has the empty name, which would be invisible."""
    if module is None:
        return "-"
    return module or ROOT


@dataclass(frozen=True, slots=True, repr=False)
class Place(Shown):
    """Where one thread of one rank is, or was.

    `module` is `None` outside any module and `""` in the root itself. `call` counts the calls of
    that module within the step. `param` is set where a parameter's gradient is being accumulated.
    `line` is the user's `file:line` that led here.
    """

    rank: int
    step: int | None
    pass_: str
    module: str | None = None
    call: int | None = None
    line: str | None = None
    graph: str | None = None
    thread: str | None = None
    certainty: Certainty = Certainty.EXACT
    param: str | None = None

    def __repr__(self) -> str:
        """As it would be made, without what is not known. Long names are cut: `str` and `to_dict()`
        have them whole."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        known = [
            f"{name}={_cut(value)!r}"
            for name, value in values
            if value is not None and value is not Certainty.EXACT
        ]
        return f"Place({', '.join(known)})"

    def __str__(self) -> str:
        parts = [f"rank {self.rank}"]
        if self.step is not None:
            parts.append(f"step {self.step}")
        parts.append(self._what())
        if self.graph is not None:
            parts.append(f"graph {self.graph}")
        if self.line is not None:
            parts.append(self.line)
        if self.thread not in (None, "MainThread"):
            parts.append(f"thread {self.thread}")
        if self.certainty is not Certainty.EXACT:
            parts.append(f"({self.certainty})")
        return printable(", ".join(parts))

    def _what(self) -> str:
        if self.module is None and self.param is None:
            return "outside any module" if self.pass_ == "outside" else f"{self.pass_} (no module)"
        name = self.param if self.param is not None else shown(self.module)
        call = f" call {self.call}" if self.call else ""
        return f"{self.pass_} of {name}{call}"

    def to_dict(self) -> dict[str, object]:
        """The place as JSON knows it; `pass_` is `pass` there, the name of the event field."""
        return {
            "rank": self.rank,
            "step": self.step,
            "pass": self.pass_,
            "module": self.module,
            "call": self.call,
            "line": self.line,
            "graph": self.graph,
            "thread": self.thread,
            "certainty": str(self.certainty),
            "param": self.param,
        }

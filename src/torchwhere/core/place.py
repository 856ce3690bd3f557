"""A place: the answer to "where is it?", part of everything that torchwhere records or prints.

`torchwhere.where()` returns the place of the running code, and a black box holds places in its
records. Both use the same `Place`. This file does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum
from typing import Any

from torchwhere.core.results import Shown
from torchwhere.core.sanitize import printable


class Pass(IntEnum):
    """The part of a step that runs.

    The file format stores these values. `RECOMPUTE` is `FORWARD` with one more bit, so that the hot
    path turns a packed forward place into a recompute place with a single `|`. `SHAPE_INFERENCE` is
    a forward that only computes shapes (a pipeline's metadata inference, fake tensors): torchwhere
    shows it as forward and does not count its calls.
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


PASS_LABELS = {int(pass_): pass_.label for pass_ in Pass}


class Certainty(StrEnum):
    """How torchwhere knows a place or a verdict.

    Attributes:
        EXACT: It was read from the program.
        INFERRED: It was concluded from other facts, and could be wrong.
        UNKNOWN: It is not known.
    """

    EXACT = "exact"
    INFERRED = "inferred"
    UNKNOWN = "unknown"


ROOT = "<root>"
_LINE_SEPARATOR = "\t"
# The fields of a place that JSON has for each rank and each device.
RANK_FIELDS = ("step", "pass", "module", "call", "line", "framework_line")
_MAX_NAME = 60  # characters of a name in a `repr`


def _cut(value: object) -> object:
    if not isinstance(value, str):
        return value
    return str(value) if len(value) <= _MAX_NAME else f"{value[: _MAX_NAME - 1]}…"


def shown(module: str | None) -> str:
    """A module's name for display: the root module has an empty name, shown as `<root>`."""
    if module is None:
        return "-"
    return module or ROOT


@dataclass(frozen=True, slots=True, repr=False)
class Place(Shown):
    """Where one thread of one rank is, or was. `str()` gives it on one line.

    Attributes:
        rank: The global rank.
        step: The step; None if it is not known.
        pass_: `forward`, `backward`, `recompute`, `optimizer` or `outside`.
        module: The name of the module, as in `state_dict`. None outside any module, `""` in the
            root module.
        call: Which call of that module within the step, from 0.
        line: The `file:line` of user code that led here.
        framework_line: The innermost frame of an installed package, such as transformers or
            lightning, that this line has called: `transformers/trainer.py:2322 training_step`.
            None if there is none.
        graph: The id of the compiled graph that runs or is being compiled.
        thread: The name of the thread.
        certainty: How torchwhere knows the place.
        param: The parameter whose gradient is being accumulated, if any.

    Example:
        place = torchwhere.where()
        print(place.step, place.module, place.line)
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
    framework_line: str | None = None

    def __repr__(self) -> str:
        """The call that creates it, without unknown fields. It cuts long names; `str()` and
        `to_dict()` keep them."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        arguments = [
            f"{name}={_cut(value)!r}"
            for name, value in values
            if value is not None and value is not Certainty.EXACT
        ]
        return f"Place({', '.join(arguments)})"

    def __str__(self) -> str:
        parts = [f"rank {self.rank}"]
        if self.step is not None:
            parts.append(f"step {self.step}")
        parts.append(self.activity())
        if self.graph is not None:
            parts.append(f"graph {self.graph}")
        if self.line is not None:
            parts.append(self.full_line)
        if self.thread not in (None, "MainThread"):
            parts.append(f"thread {self.thread}")
        if self.certainty is not Certainty.EXACT:
            parts.append(f"({self.certainty})")
        return printable(", ".join(parts))

    @property
    def full_line(self) -> str:
        """The user's line, and the line of the framework that it has called:
        `train.py:12, in transformers/trainer.py:2322 training_step`. Empty if it is unknown."""
        inner = f", in {self.framework_line}" if self.framework_line is not None else ""
        return f"{self.line or ''}{inner}"

    def activity(self) -> str:
        """The pass, and the module or parameter: `forward of layers.3.mlp`."""
        if self.module is None and self.param is None:
            return "outside any module" if self.pass_ == "outside" else f"{self.pass_} (no module)"
        name = self.param if self.param is not None else shown(self.module)
        call = f" call {self.call}" if self.call else ""
        return f"{self.pass_} of {name}{call}"

    def to_dict(self) -> dict[str, object]:
        """Return the place as values for JSON. The field `pass_` is called `pass` there."""
        return {
            "rank": self.rank,
            "step": self.step,
            "pass": self.pass_,
            "module": self.module,
            "call": self.call,
            "line": self.line,
            "framework_line": self.framework_line,
            "graph": self.graph,
            "thread": self.thread,
            "certainty": str(self.certainty),
            "param": self.param,
        }


# -- lines as a box stores them --------------------------------------------------------------------


def stored_line(line: str, framework_line: str | None) -> str:
    """The text of a box for both lines, so that one id stands for both."""
    return line if framework_line is None else f"{line}{_LINE_SEPARATOR}{framework_line}"


def line_fields(stored: str | None) -> dict[str, Any]:
    """The fields `line` and `framework_line` of a `Place`, from the text of a box."""
    line, separator, framework_line = (stored or "").partition(_LINE_SEPARATOR)
    return {
        "line": line if stored is not None else None,
        "framework_line": framework_line if separator else None,
    }


def line_text(stored: str) -> str:
    """The text of a box for display, as `Place.full_line`."""
    return stored.replace(_LINE_SEPARATOR, ", in ")


def unknown_place(rank: int = -1) -> Place:
    """The place of a rank of which nothing else is known."""
    return Place(rank, None, Pass.OUTSIDE.label, certainty=Certainty.UNKNOWN)

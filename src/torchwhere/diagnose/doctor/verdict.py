"""The verdict: its kind, the culprits, the place and the cause. The JSON names are a contract
(`docs/doctor.md`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torchwhere.core.place import Certainty, Place
from torchwhere.core.results import Shown, Tabular
from torchwhere.diagnose.doctor.compact_json import folded


class VerdictKind(StrEnum):
    """The fault of a job."""

    MISSING = "missing"  # some ranks never issued what the others wait for
    MISMATCH = "mismatch"  # at one number ranks issued different calls
    DEADLOCK = "deadlock"  # ranks wait for each other in a cycle
    DEAD = "dead"  # a rank exited while others wait
    STRAGGLER = "straggler"  # progressing, but ranks are late repeatedly
    TOGETHER = "together"  # all are in the same place, none is missing: network or device
    HEALTHY = "healthy"


class State(StrEnum):
    """What one rank is doing."""

    RUNNING = "running"
    WAITING = "waiting"
    STOPPED = "stopped"
    DEAD = "dead"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, repr=False)
class RankReport(Shown):
    """One rank in a verdict."""

    state: State
    place: Place
    last: dict[str, Any] | None = None  # its last collective
    detail: str | None = None  # how it exited, or what blocks it
    stack: tuple[str, ...] = ()  # its Python stack, innermost line first, if available

    def to_dict(self) -> dict[str, Any]:
        place = self.place.to_dict()
        fields = {"state": str(self.state)} | {
            name: place[name] for name in ("step", "pass", "module", "call", "line")
        }
        return fields | {"last": self.last, "detail": self.detail, "stack": list(self.stack)}


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(Shown, Tabular):
    """The culprits, the place and the cause.

    `ranks` has every rank with data. As JSON it is `{rank: {state, step, pass, module, call, line,
    last, detail, stack}}`, complete for up to 256 ranks. Beyond that, the culprits and one rank of
    each kind are complete, and all others have `{state, step, like}`: `like` is the rank whose
    report represents theirs, and `alike_in` lists the fields in which they are equal (16,384 ranks:
    about 1 MB). In Python all reports are always complete.
    """

    kind: VerdictKind
    culprits: tuple[int, ...] = ()
    collective: dict[str, Any] | None = None
    ranks: dict[int, RankReport] = field(default_factory=dict)
    last_common: dict[str, Any] | None = None
    missing_data: tuple[str, ...] = ()
    certainty: Certainty = Certainty.EXACT
    stalled_s: float | None = None
    explanation: tuple[str, ...] = ()  # sentences: the fault, the cause, what to look at
    # data of this kind: cohorts, circle, lateness, pace
    facts: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": str(self.kind),
            "culprits": list(self.culprits),
            "collective": self.collective,
            **folded(self.ranks, self.culprits),
            "last_common": self.last_common,
            "missing_data": list(self.missing_data),
            "certainty": str(self.certainty),
            "stalled_s": self.stalled_s,
            "facts": self.facts,
        }

    def as_rows(self) -> list[dict[str, Any]]:
        """One row per rank: state, place, last collective."""
        return [_as_row(rank, report) for rank, report in sorted(self.ranks.items())]


def _as_row(rank: int, report: RankReport) -> dict[str, Any]:
    row = {"rank": rank} | report.to_dict()
    last, stack = row.pop("last") or {}, row.pop("stack")
    return (
        row
        | {f"last_{name}": last.get(name) for name in ("op", "group", "number")}
        | {"stack": "\n".join(stack) or None}
    )

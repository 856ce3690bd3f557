"""What a verdict is: one kind, who, where, and why. The JSON names are a contract
(`docs/doctor.md`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torchwhere.core.place import Certainty, Place
from torchwhere.core.results import Shown, Tabular
from torchwhere.diagnose.doctor.compact_json import folded


class VerdictKind(StrEnum):
    """What is the matter with a job."""

    MISSING = "missing"  # some ranks never issued what the others wait for
    MISMATCH = "mismatch"  # at one number ranks issued something different
    DEADLOCK = "deadlock"  # ranks wait for each other in a circle
    DEAD = "dead"  # a rank ended while others wait
    STRAGGLER = "straggler"  # progressing, one rank late again and again
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
    """One rank, as the verdict sees it."""

    state: State
    place: Place
    last: dict[str, Any] | None = None  # its last collective
    detail: str | None = None  # what else is known: how it ended, what it is stuck in
    stack: tuple[str, ...] = ()  # its Python stack, innermost line first, where it was to be had

    def to_dict(self) -> dict[str, Any]:
        place = self.place.to_dict()
        found = {"state": str(self.state)} | {
            name: place[name] for name in ("step", "pass", "module", "call", "line")
        }
        return found | {"last": self.last, "detail": self.detail, "stack": list(self.stack)}


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(Shown, Tabular):
    """Who, where and why.

    `ranks` has every rank that was heard. As JSON it is `{rank: {state, step, pass, module, call,
    line, last, detail, stack}}`, with every rank whole, up to 256 of them. Beyond that the culprits
    and one rank of each kind are whole, and all others have `{state, step, like}`: `like` is the
    rank whose report stands for theirs, and `alike_in` says in what they are the same (as of 16,384
    ranks: about 1 MB). In Python all of them are always whole.
    """

    kind: VerdictKind
    culprits: tuple[int, ...] = ()
    collective: dict[str, Any] | None = None
    ranks: dict[int, RankReport] = field(default_factory=dict)
    last_common: dict[str, Any] | None = None
    missing_data: tuple[str, ...] = ()
    certainty: Certainty = Certainty.EXACT
    stalled_s: float | None = None
    explanation: tuple[str, ...] = ()  # sentences for people: what was found, why, what to look at
    # what only this kind has: cohorts, circle, lateness, pace
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
        """The ranks, one a row: state, place, last collective."""
        return [_as_row(rank, report) for rank, report in sorted(self.ranks.items())]


def _as_row(rank: int, report: RankReport) -> dict[str, Any]:
    found = {"rank": rank} | report.to_dict()
    last, stack = found.pop("last") or {}, found.pop("stack")
    return (
        found
        | {f"last_{name}": last.get(name) for name in ("op", "group", "number")}
        | {"stack": "\n".join(stack) or None}
    )

"""The verdict: its kind, the culprits, the place and the cause. The JSON names are a contract
(`docs/doctor.md`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any

from torchwhere.core.device_place import DevicePlace
from torchwhere.core.place import RANK_FIELDS, Certainty, Place
from torchwhere.core.results import Shown, Tabular
from torchwhere.processes.status import WorkerStatus


class VerdictKind(StrEnum):
    """What is wrong with a job.

    Attributes:
        MISSING: Some ranks never issued a call that the others wait for.
        MISMATCH: Ranks issued different calls at the same number of a group.
        DEADLOCK: Ranks wait for each other in a cycle.
        DEAD: A rank exited while others wait for it.
        STRAGGLER: The job progresses, but some ranks are late repeatedly.
        TOGETHER: All ranks are blocked in the same place, and none is missing: suspect the network
            or a device.
        PARTIAL: No fault is known, but not all ranks are watched.
        HEALTHY: None of these.
    """

    MISSING = "missing"
    MISMATCH = "mismatch"
    DEADLOCK = "deadlock"
    DEAD = "dead"
    STRAGGLER = "straggler"
    TOGETHER = "together"
    PARTIAL = "partial"
    HEALTHY = "healthy"


NO_FAULT = frozenset({VerdictKind.PARTIAL, VerdictKind.HEALTHY})


class State(StrEnum):
    """What one rank is doing.

    Attributes:
        RUNNING: It is not waiting in a collective.
        WAITING: It has issued a collective and waits for other ranks.
        STOPPED: A signal has stopped its process.
        DEAD: Its process has exited before the job finished.
        FINISHED: Its process has ended successfully.
    """

    RUNNING = "running"
    WAITING = "waiting"
    STOPPED = "stopped"
    DEAD = "dead"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, repr=False)
class RankReport(Shown):
    """One rank in a verdict.

    Attributes:
        state: What the rank is doing.
        place: Where it is, or was last.
        last: Its last collective.
        detail: How it exited, or what blocks it.
        stack: Its Python stack, innermost line first, if available.
        device: Where its device is, beside its CPU; None if that is not known.
        workers: The processes that it waits for, for example its DataLoader workers, with their
            stacks.
    """

    state: State
    place: Place
    last: dict[str, Any] | None = None
    detail: str | None = None
    stack: tuple[str, ...] = ()
    device: DevicePlace | None = None
    workers: tuple[WorkerStatus, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        place = self.place.to_dict()
        fields = {"state": str(self.state)} | {name: place[name] for name in RANK_FIELDS}
        return fields | {
            "last": self.last,
            "detail": self.detail,
            "stack": list(self.stack),
            "device": self.device.to_dict() if self.device is not None else None,
            "workers": [worker.to_dict() for worker in self.workers],
        }


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(Shown, Tabular):
    """The result of the doctor. `str()` explains it.

    Attributes:
        kind: What is wrong.
        culprits: The ranks that caused it; empty if no rank is to blame.
        collective: The collective that ranks wait for, or in which they differ.
        ranks: The state and place of every rank with data.
        last_common: The last collective before it that all ranks issued.
        missing_data: Data that the verdict lacks.
        certainty: `exact`, `inferred` or `unknown`.
        stalled_s: How long the job has been waiting, in seconds, if known.
        explanation: Sentences: the fault, the cause, what to look at.
        facts: Data of this kind of verdict: cohorts, the cycle of waits, lateness.

    As JSON, `ranks` is `{rank: {state, step, pass, module, call, line, framework_line, last,
    detail, stack, device, workers}}`, complete for up to 256 ranks. Beyond that, the culprits and
    one rank of each kind are complete, and all others have `{state, step, like}`: `like` is the
    rank whose report represents theirs, and `alike_in` lists the fields in which they are equal
    (16,384 ranks: about 1 MB). In Python all reports are always complete.

    Example:
        verdict = torchwhere.doctor("run/")
        if verdict.kind != "healthy":
            print(verdict, verdict.culprits)
    """

    kind: VerdictKind
    culprits: tuple[int, ...] = ()
    collective: dict[str, Any] | None = None
    ranks: dict[int, RankReport] = field(default_factory=dict)
    last_common: dict[str, Any] | None = None
    missing_data: tuple[str, ...] = ()
    certainty: Certainty = Certainty.EXACT
    stalled_s: float | None = None
    explanation: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as values for JSON."""
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
        """Return one row for each rank: state, place, last collective, and the place of the device
        if one is known."""
        has_device = any(report.device is not None for report in self.ranks.values())
        return [
            _as_row(rank, report) | (_device_columns(report) if has_device else {})
            for rank, report in sorted(self.ranks.items())
        ]


def _as_row(rank: int, report: RankReport) -> dict[str, Any]:
    row = {"rank": rank} | report.to_dict()
    last, stack, _ = row.pop("last") or {}, row.pop("stack"), row.pop("device")
    return (
        row
        | {f"last_{name}": last.get(name) for name in ("op", "group", "number")}
        | {"stack": "\n".join(stack) or None}
    )


def _device_columns(report: RankReport) -> dict[str, Any]:
    values = report.device.to_dict() if report.device is not None else {}
    names = ("step", "pass", "module", "line", "steps_behind", "collectives_behind")
    return {f"device_{name}": values.get(name) for name in names}


# -- JSON of many ranks ----------------------------------------------------------------------------

MOST_WHOLE = 256
_CULPRITS = 64  # most culprits that are complete
_ALIKE_IN = (
    ("state", "pass", "module", "call", "line", "detail", "op", "group", "number"),
    ("state", "pass", "module", "line", "detail", "op", "group"),
    ("state", "pass", "module", "op"),
    ("state", "pass", "op"),
    ("state",),
)


def folded(ranks: Mapping[int, RankReport], culprits: Iterable[int]) -> dict[str, Any]:
    """`ranks` of a verdict, and `alike_in` if not all of them are complete.

    16,384 complete reports would be tens of megabytes. In a job with more than `MOST_WHOLE` ranks,
    the culprits and one rank of each kind are complete; all others have `state`, `step` and `like`:
    the rank whose report represents theirs. `alike_in` lists the fields in which the two are equal:
    all but the step if there are few kinds of ranks, fewer fields otherwise.
    """
    in_order = sorted(ranks.items())
    if len(ranks) <= MOST_WHOLE:
        return {"ranks": {str(rank): report.to_dict() for rank, report in in_order}}
    names, heads = _heads(in_order)
    whole = {rank for rank in list(culprits)[:_CULPRITS] if rank in ranks} | set(heads.values())
    reports: dict[str, Any] = {}
    for rank, report in in_order:
        if rank in whole:
            reports[str(rank)] = report.to_dict()
        else:
            reports[str(rank)] = {
                "state": str(report.state),
                "step": report.place.step,
                "like": heads[_key(report, names)],
            }
    return {"ranks": reports, "alike_in": list(names)}


def _heads(
    ranks: list[tuple[int, RankReport]],
) -> tuple[tuple[str, ...], dict[tuple[Any, ...], int]]:
    """The fields that distinguish kinds of ranks, and the first rank of each kind."""
    for names in _ALIKE_IN:
        heads: dict[tuple[Any, ...], int] = {}
        for rank, report in ranks:
            heads.setdefault(_key(report, names), rank)
            if len(heads) > MOST_WHOLE:
                break
        else:
            break
    return names, heads


def _key(report: RankReport, names: tuple[str, ...]) -> tuple[Any, ...]:
    last = report.last or {}
    return tuple([_GET[name](report) if name in _GET else last.get(name) for name in names])


# The other names are fields of the last collective.
_GET = {
    "state": attrgetter("state"),
    "pass": attrgetter("place.pass_"),
    "module": attrgetter("place.module"),
    "call": attrgetter("place.call"),
    "line": attrgetter("place.full_line"),
    "detail": attrgetter("detail"),
}

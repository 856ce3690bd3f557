"""What the doctor finds: facts, without sentences. `render/verdict_text/` makes the sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchwhere.core.place import Certainty
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.doctor.waits import Wait

_SHOWN = ("op", "number", "dtype", "shapes", "bytes", "reduce_op", "peer", "for")
_MOST_RANKS_SHOWN = 64


class CallRef(NamedTuple):
    """One collective: its stream, its number, and a rank that has issued it."""

    key: StreamKey
    number: int
    rank: int

    @classmethod
    def of(cls, wait: Wait) -> CallRef:
        return cls(wait.key, wait.number, wait.rank)

    def to_dict(self, job_calls: JobCalls) -> dict[str, Any]:
        """The collective for JSON."""
        call = job_calls.by_rank[self.rank].issued(self.key, self.number)
        group = job_calls.group(self.key)
        fields = shown_fields(call.fields) if call is not None else {"number": self.number}
        return fields | {"group": group.title, "group_ranks": shown_ranks(group.ranks)}

    def previous_to_dict(self, job_calls: JobCalls) -> dict[str, Any] | None:
        """The collective before it, with its place, for JSON; None if it is unknown."""
        previous = self._replace(number=self.number - 1)
        place = job_calls.by_rank[self.rank].place_of(*previous[:2]) if self.number else None
        if place is None:
            return None
        values = place.to_dict()
        if place.module is None and place.certainty is Certainty.UNKNOWN:
            values["pass"] = None
        names = ("step", "pass", "module", "line", "framework_line")
        return previous.to_dict(job_calls) | {name: values[name] for name in names}


def shown_ranks(ranks: Sequence[int]) -> list[int] | int:
    """The ranks of a group for JSON; of a large one, their number."""
    return list(ranks) if len(ranks) <= _MOST_RANKS_SHOWN else len(ranks)


def shown_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a collective that a verdict shows."""
    return {name: fields.get(name) for name in _SHOWN} | {"group": fields.get("group_desc")}


def exact_if(is_known: object) -> Certainty:
    """`exact` if something is known for certain, else `inferred`."""
    return Certainty.EXACT if is_known else Certainty.INFERRED


class Cause:
    """Why a verdict was given: each rule has its own dataclass with the facts that its sentences
    need."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule returns."""

    kind: VerdictKind
    cause: Cause
    culprits: tuple[int, ...] = ()
    call: CallRef | None = None  # the collective in question
    certainty: Certainty = Certainty.EXACT
    stalled_s: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # data of this kind, for JSON
    blocked: frozenset[int] = frozenset()  # ranks that wait because of it, besides those in `waits`

"""Finds that a job has no known fault but also no data for some ranks: it is not called healthy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import Cause, Finding
from torchwhere.diagnose.doctor.verdict import VerdictKind


@dataclass(frozen=True, slots=True)
class PartlyWatched(Cause):
    """The ranks with data show no fault; the others have no data."""

    of_watched: Cause  # what the ranks with data show
    unwatched: tuple[int, ...]


def never_healthy_in_part(context: Context, finding: Finding) -> Finding:
    """The finding; with the kind `partial` if it is `healthy` and a rank has no data."""
    is_healthy = finding.kind is VerdictKind.HEALTHY and context.run.noun != "dump"
    if not is_healthy or not context.no_data:
        return finding
    unwatched = tuple(sorted(context.no_data))
    facts = finding.facts | {"unwatched": list(unwatched)}
    return replace(
        finding,
        kind=VerdictKind.PARTIAL,
        cause=PartlyWatched(finding.cause, unwatched),
        facts=facts,
    )

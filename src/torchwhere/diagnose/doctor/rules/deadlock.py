"""Rule: ranks wait for each other in a cycle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.deadlocks import Blame, blame
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding
from torchwhere.diagnose.doctor.rules.wrong_peer import wrong_peers
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.doctor.waits import Wait, cycle

_MOST_LINKS = 16  # waits of a cycle in the JSON


@dataclass(frozen=True, slots=True)
class Deadlock(Cause):
    """Ranks that wait for each other, the last one for the first."""

    cycle: tuple[Wait, ...]
    blame: Blame


def find_deadlock(context: Context) -> Finding | None:
    waits = cycle(context.waits)
    if not waits or not context.timing.is_stalled(waits[0]):
        return None
    blamed = blame(context.job_calls, waits, context.waits, unread=context.incomplete)
    certainty = Certainty.INFERRED if context.incomplete else blamed.certainty
    links = [_link(context, wait) for wait in waits[:_MOST_LINKS]]
    if blamed.has_wrong_peer:
        strays = [context.waits[rank] for rank in blamed.culprits]
        return wrong_peers(context, strays, certainty, circle=links)
    return Finding(
        VerdictKind.DEADLOCK,
        Deadlock(tuple(waits), blamed),
        culprits=blamed.culprits,
        call=CallRef.of(waits[0]),
        certainty=certainty,
        stalled_s=context.timing.waited_s(waits[0]),
        facts={"circle": links},
    )


def _link(context: Context, wait: Wait) -> dict[str, Any]:
    """One wait of the cycle, for JSON."""
    return {
        "rank": wait.rank,
        "waits_for": list(wait.missing[:16]),
        "collective": CallRef.of(wait).to_dict(context.job_calls),
        "place": context.place(wait.rank).to_dict(),
    }

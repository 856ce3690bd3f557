"""Rule: a rank waits on a new peer while a peer that it used before waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.call_patterns import Patterns
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.deadlocks import switched_peer
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.doctor.waits import Wait, new_peers


@dataclass(frozen=True, slots=True)
class WrongPeers(Cause):
    """Ranks that wait on another peer than usual."""

    waits: tuple[Wait, ...]


def find_wrong_peer(context: Context) -> Finding | None:
    job_calls = context.job_calls
    candidates = [
        wait
        for wait in new_peers(job_calls, context.waits.values())
        if context.timing.is_stalled(wait)
    ]
    if not candidates:
        return None
    patterns = Patterns(job_calls, ranks=len(candidates))
    strays = [wait for wait in candidates if switched_peer(patterns, wait)]
    return wrong_peers(context, strays, Certainty.INFERRED) if strays else None


def wrong_peers(
    context: Context, strays: Sequence[Wait], certainty: Certainty, **facts: Any
) -> Finding:
    """The finding on ranks that wait on the wrong peer."""
    return Finding(
        VerdictKind.MISMATCH,
        WrongPeers(tuple(strays)),
        culprits=tuple(stray.rank for stray in strays),
        call=CallRef.of(strays[0]),
        certainty=certainty,
        stalled_s=context.timing.waited_s(strays[0]),
        facts={"differs_in": ["peer"], **facts},
    )

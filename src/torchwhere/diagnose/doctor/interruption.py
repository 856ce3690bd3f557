"""A job that was ended from outside, with Ctrl-C or SIGTERM: what ranks say then is how they were
ended, and not what was wrong before.

A `KeyboardInterrupt` on several ranks was not raised by one of them. On a single rank it may have
been, unless others had waited for that rank for long: the one that hangs in Python is often the
only one that can be interrupted. A rank that catches SIGTERM says so in its exit record; most do
not catch it, and leave no record.
"""

from __future__ import annotations

import re

from torchwhere.core.errors import FAILED
from torchwhere.diagnose.calls.rank_calls import JobCalls, RankCalls
from torchwhere.diagnose.doctor.waits import waiting_for, waits

_INTERRUPT = "KeyboardInterrupt"
_TERMINATED = re.compile(
    r"(?:exit|exception: SystemExit:) (?:143|-15)|exception: .*(?:\bSIGTERM|\bsignal:? 15\b).*",
    re.IGNORECASE | re.DOTALL,
)


def interrupted(job_calls: JobCalls, *, waited_s: float) -> dict[int, int]:
    """The ranks that were ended from outside, and when, by their wall clocks; who waited so long
    before had long hung."""
    found = {
        rank: t_ns
        for rank, said in job_calls.by_rank.items()
        if (t_ns := _moment(said)) is not None
    }
    if len(found) > 1 or not found:
        return found
    ((rank, t_ns),) = found.items()
    others = waiting_for(waits(job_calls), [rank])
    since = [
        issued
        for wait in others
        if (issued := job_calls.by_rank[wait.rank].issued_ns(wait.key, wait.number))
    ]
    return found if t_ns - min(since, default=t_ns) > waited_s * 1e9 else {}


def _moment(said: RankCalls) -> int | None:
    reason = str(said.end.fields.get("reason")) if said.end is not None else ""
    error = said.exception
    if (
        error is not None
        and str(error.fields.get("text")).startswith(_INTERRUPT)
        and (said.end is None or FAILED in reason)
    ):
        return error.t_ns
    return (
        said.end.t_ns
        if said.end is not None
        and (reason.startswith(f"{FAILED}{_INTERRUPT}") or was_terminated(said))
        else None
    )


def was_terminated(said: RankCalls) -> bool:
    """Whether a rank says that SIGTERM ended it."""
    return (
        said.end is not None
        and _TERMINATED.fullmatch(str(said.end.fields.get("reason"))) is not None
    )

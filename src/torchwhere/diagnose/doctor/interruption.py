"""Detects jobs that Ctrl-C or SIGTERM ended: their exit records show how they were ended, not what
was wrong before.

A `KeyboardInterrupt` on several ranks was not raised by one of them. On a single rank it may have
been, unless others had waited long for that rank: a rank that hangs in Python is often the only one
that Ctrl-C can interrupt. A rank that catches SIGTERM says so in its exit record; most ranks do not
catch it and leave no record.
"""

from __future__ import annotations

import re

from torchwhere.core.errors import FAILED
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.waits import waiting_for, waits

_INTERRUPT = "KeyboardInterrupt"
_TERMINATED = re.compile(
    r"(?:exit|exception: SystemExit:) (?:143|-15)|exception: .*(?:\bSIGTERM|\bsignal:? 15\b).*",
    re.IGNORECASE | re.DOTALL,
)


def interrupted(job_calls: JobCalls, *, waited_s: float) -> dict[int, int]:
    """The ranks that were ended from outside, and when, by their wall clocks.

    A single rank counts only if others had waited for it longer than `waited_s`: it hung before.
    """
    interrupted_ns = {
        rank: t_ns
        for rank, rank_calls in job_calls.by_rank.items()
        if (t_ns := _moment(rank_calls)) is not None
    }
    if len(interrupted_ns) > 1 or not interrupted_ns:
        return interrupted_ns
    ((rank, t_ns),) = interrupted_ns.items()
    others = waiting_for(waits(job_calls), [rank])
    since = [
        issued
        for wait in others
        if (issued := job_calls.by_rank[wait.rank].issued_ns(wait.key, wait.number))
    ]
    return interrupted_ns if t_ns - min(since, default=t_ns) > waited_s * 1e9 else {}


def _moment(rank_calls: RankCalls) -> int | None:
    reason = str(rank_calls.end.fields.get("reason")) if rank_calls.end is not None else ""
    error = rank_calls.exception
    if (
        error is not None
        and str(error.fields.get("text")).startswith(_INTERRUPT)
        and (rank_calls.end is None or FAILED in reason)
    ):
        return error.t_ns
    return (
        rank_calls.end.t_ns
        if rank_calls.end is not None
        and (reason.startswith(f"{FAILED}{_INTERRUPT}") or was_terminated(rank_calls))
        else None
    )


def was_terminated(rank_calls: RankCalls) -> bool:
    """Whether the exit record of a rank says that SIGTERM ended it."""
    return (
        rank_calls.end is not None
        and _TERMINATED.fullmatch(str(rank_calls.end.fields.get("reason"))) is not None
    )

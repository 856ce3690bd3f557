"""Checks a finding on dumps by their age: how long calls were pending when a dump was written.

Ranks write their dumps at different moments. If the job progresses, a rank whose dump is a moment
older than the others looks like one that has not come. So calls that were issued only a moment
before the dumps were written show no hang.

The time of a file is the time of its dump, or later for a copy: an age is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.dump_causes import BehindRanks, JustIssued

# A watchdog writes dumps after a timeout of minutes, and torchwhere asks for them after a stall.
# The recorded dumps of NCCL timeouts have an age of 6.7 s and more.
MOMENT_S = 1.0
CLOCK_SLACK_S = 5.0  # between the clocks of a rank and of the file system
_IN_ONE_CALL = (VerdictKind.MISSING, VerdictKind.TOGETHER)
_HANGS = (*_IN_ONE_CALL, VerdictKind.DEADLOCK, VerdictKind.MISMATCH)


def checked_by_age(
    context: Context, finding: Finding, written_ns: Mapping[int, int | None]
) -> Finding:
    """Check a finding by the times of the files, where they are known.

    If all calls on which it rests were issued a moment before the dumps were written, no rank is
    named. A rank is only `exact` if its dump is known to be newer than the call that it lacks.

    A rank without a dump is another kind of evidence: a process that failed writes none, and the
    others may abort at once.
    """
    call = finding.call
    have_dumps = all(rank in context.by_rank for rank in finding.culprits)
    is_known = finding.certainty is not Certainty.UNKNOWN
    if call is None or finding.kind not in _HANGS or not is_known or not have_dumps:
        return finding
    calls = _calls(context, finding, call)
    issued_ns = [context.by_rank[rank].issued_ns(key, number) for key, number, rank in calls]
    ages_s = [
        _since_s(t_ns, written_ns.get(ref.rank)) for ref, t_ns in zip(calls, issued_ns, strict=True)
    ]
    if all(-CLOCK_SLACK_S < age_s < MOMENT_S for age_s in ages_s):
        in_it = {call.rank, *(ref.rank for ref in calls if ref[:2] == call[:2])}
        return _undecided(finding, JustIssued(tuple(sorted(in_it)), call, max(0.0, *ages_s)))
    if finding.certainty is Certainty.EXACT and any(
        _since_s(min(issued_ns), written_ns.get(rank)) < MOMENT_S for rank in finding.culprits
    ):
        return replace(finding, certainty=Certainty.INFERRED)
    return finding


def _calls(context: Context, finding: Finding, call: CallRef) -> list[CallRef]:
    """The pending calls on which a finding rests.

    A rank that is behind may have a dump from the moment at which it failed: then the waits of the
    others show the hang.
    """
    waits = list(context.waits.values())
    if finding.kind in _IN_ONE_CALL and not isinstance(finding.cause, BehindRanks):
        waits = [wait for wait in waits if wait.call == call[:2]]
    return [CallRef.of(wait) for wait in waits] or [call]


def _since_s(issued_ns: int, written_ns: int | None) -> float:
    """Seconds from a call to a dump; minus infinity if the time of the dump is unknown."""
    return (written_ns - issued_ns) / 1e9 if written_ns is not None else -math.inf


def _undecided(finding: Finding, cause: Cause) -> Finding:
    if isinstance(finding.cause, BehindRanks):
        cause = replace(finding.cause, is_clear=False)
    return Finding(VerdictKind.MISSING, cause, call=finding.call, certainty=Certainty.UNKNOWN)

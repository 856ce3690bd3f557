"""Sentences on what monitors and snapshots add to a verdict."""

from __future__ import annotations

from collections.abc import Mapping

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.render.verdict_text.phrases import agree

_MOST_RUNS = 8  # of ranks


def snapshots_text(job_calls: JobCalls) -> str:
    """The ranks whose calls come from snapshots."""
    ranks = sorted(job_calls.from_snapshot)
    whose = agree(ranks, "its box", "their boxes")
    later = "; later calls are unknown" if job_calls.stale & job_calls.from_snapshot else ""
    return f"calls of {ranks_phrase(ranks, most=_MOST_RUNS)} come from a snapshot of {whose}{later}"


def hosts_text(hosts: Mapping[int, str]) -> list[str]:
    """The hosts of the culprits."""
    return [f"  rank {rank} is on host {host}" for rank, host in hosts.items()]


def wait_over_text(now: Verdict) -> str:
    """Say on stderr that a reported wait is over."""
    return f"torchwhere: the wait is over, and the job continues. {now.explanation[0]}"


def pause_text(verdict: Verdict) -> str:
    """Say on stderr that a long wait is a pause."""
    return " ".join(["torchwhere:", *(line.strip() for line in verdict.explanation)])


def passed_text(now: Verdict) -> str:
    """Say in the file of the verdict that a reported wait is over."""
    return f"The wait is over: the job continued. {now.explanation[0]}"

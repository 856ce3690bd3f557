"""Assembles a verdict: the facts of a finding, a report on each rank, and the sentences."""

from __future__ import annotations

from typing import Any

from torchwhere.core.sanitize import plural
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.examine import Diagnosis
from torchwhere.diagnose.doctor.finding import Finding, shown_fields
from torchwhere.diagnose.doctor.rules.mismatch import DifferentCalls
from torchwhere.diagnose.doctor.rules.straggler import LateRanks
from torchwhere.diagnose.doctor.verdict import RankReport, Verdict
from torchwhere.render.verdict_text.exits import external_end_text
from torchwhere.render.verdict_text.explanation import explain
from torchwhere.render.verdict_text.mismatch import cohort_rows
from torchwhere.render.verdict_text.rank_details import detail_text
from torchwhere.render.verdict_text.straggler import late_ranks_facts


def verdict_of(diagnosis: Diagnosis) -> Verdict:
    """The verdict on what the doctor found."""
    context, finding = diagnosis.context, diagnosis.finding
    call, job_calls = finding.call, context.job_calls
    return Verdict(
        kind=finding.kind,
        culprits=finding.culprits,
        collective=call.to_dict(job_calls) if call is not None else None,
        ranks={rank: _report(context, finding, rank) for rank in job_calls.by_rank},
        last_common=call.previous_to_dict(job_calls) if call is not None else None,
        missing_data=tuple(_missing_data(context)),
        certainty=finding.certainty,
        stalled_s=finding.stalled_s,
        explanation=(
            *explain(finding.cause, context),
            *external_end_text(context, finding.kind),
        ),
        facts=_facts(finding),
    )


def _facts(finding: Finding) -> dict[str, Any]:
    """The facts for JSON, with those that are texts."""
    if isinstance(finding.cause, DifferentCalls):
        return finding.facts | {"cohorts": cohort_rows(finding.cause)}
    if isinstance(finding.cause, LateRanks):
        return finding.facts | late_ranks_facts(finding.cause)
    return finding.facts


def _report(context: Context, finding: Finding, rank: int) -> RankReport:
    rank_calls = context.job_calls.by_rank[rank]
    last, detail = rank_calls.last, context.detail(rank, blocked=finding.blocked)
    return RankReport(
        state=context.state(rank, blocked=finding.blocked),
        place=context.place(rank),
        last=shown_fields(rank_calls.fields(*last)) if last is not None else None,
        detail=detail_text(detail) if detail is not None else None,
        stack=context.status(rank).stack,
    )


def _missing_data(context: Context) -> list[str]:
    """What the verdict lacks."""
    ranks = context.job_calls.by_rank.values()
    lines = context.run.caveats()
    if not context.timing.is_live and any(rank_calls.end is None for rank_calls in ranks):
        lines.append(
            "no process of this job was seen alive: the states are those at the end of the boxes"
        )
    wrapped = sum(rank_calls.label.counts.overwritten > 0 for rank_calls in ranks)
    if wrapped:
        lines.append(
            f"the rings of {plural(wrapped, 'rank')} have wrapped: only calls that all rings still"
            " hold were compared"
        )
    return lines

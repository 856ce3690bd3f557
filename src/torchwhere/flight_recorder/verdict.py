"""Runs the doctor on dumps, and adds what dumps record and boxes do not: completed collectives.

The doctor gets the same evidence as from boxes, as far as dumps have it. An incomplete dump counts
for the entries it has (ranks that differ), and not for those it may have lost (the progress of its
rank).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.blackbox.string_table import Group
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.worker_pool import Progress
from torchwhere.diagnose.doctor.examine import Diagnosis, examine
from torchwhere.diagnose.doctor.finding import shown_ranks
from torchwhere.diagnose.doctor.rules.mismatch import DifferentCalls, first_mismatch
from torchwhere.diagnose.doctor.verdict import NO_FAULT, Verdict, VerdictKind
from torchwhere.diagnose.dump_age import checked_by_age
from torchwhere.diagnose.dump_causes import JustCompleted, JustIssued, NothingPending
from torchwhere.diagnose.dump_facts import (
    CompletedCalls,
    DumpCaveat,
    EarlierMismatch,
    JobContinued,
    UnseenHangs,
)
from torchwhere.diagnose.dump_hang import find_dump_hang, no_hang, without_absent
from torchwhere.diagnose.dump_mismatch import current_mismatches
from torchwhere.diagnose.dump_pace import checked_by_pace
from torchwhere.flight_recorder.dumps import Dumps, read_dumps
from torchwhere.flight_recorder.progress import job_progress, unconfirmed
from torchwhere.render.verdict_text.assemble import verdict_of

_UNKNOWN = -2  # a number of a call that is not known; -1: none


def consult_dumps(folder: str | Path, *, on_progress: Progress | None = None) -> Verdict:
    """Diagnose the flight recorder dumps in a folder.

    Args:
        folder: The folder with the dumps.
        on_progress: Called with the number of dumps read so far, and of all.

    Returns:
        The same verdict as `torchwhere doctor --flight-recorder`.

    Raises:
        TorchwhereError: The folder has no dump that can be used.

    Example:
        print(consult_dumps("dumps/"))
    """
    return diagnose_dumps(read_dumps(folder, on_progress=on_progress))


def diagnose_dumps(run: Dumps) -> Verdict:
    """Diagnose dumps that were just read. Raises `TorchwhereError` if none can be used."""
    folder = run.folder
    verdict = _diagnosed(run)
    if run.cut and verdict.kind is not VerdictKind.MISMATCH:
        run = run.without(run.cut)
        if not run.boxes:
            raise TorchwhereError(
                f"all dumps in {folder} are incomplete: {'; '.join(run.caveats()[:3])}"
            )
        verdict = _diagnosed(run)
    caveats = run.caveats()
    if verdict.kind in NO_FAULT:
        caveats.append(str(UnseenHangs()))
    verdict = replace(verdict, missing_data=tuple(caveats), stalled_s=None)
    return _with_completion(verdict, run)


def with_dumps(
    verdict: Verdict, folder: str | Path, *, on_progress: Progress | None = None
) -> Verdict:
    """Add the dumps of the same job to a verdict from boxes."""
    run = read_dumps(folder, on_progress=on_progress)
    caveats = tuple(str(DumpCaveat(caveat)) for caveat in run.caveats())
    return _with_completion(replace(verdict, missing_data=(*verdict.missing_data, *caveats)), run)


def _diagnosed(run: Dumps) -> Verdict:
    # A dump does not record when it was written. Most are written because a wait took too long:
    # every wait counts, unless the time of the file shows that it had only begun.
    diagnosis = examine(run, now_ns=run.moment_ns, stall_s=0.0)
    if diagnosis.finding.kind is VerdictKind.MISMATCH:
        return _later_hang(diagnosis, run) or _mismatch(diagnosis, run)
    return verdict_of(_hang(diagnosis, run))


def _hang(diagnosis: Diagnosis, run: Dumps) -> Diagnosis:
    """What the dumps show, apart from ranks that differ."""
    progress = job_progress(run) if run.shows_pending else None
    if progress is not None:
        diagnosis = Diagnosis(*find_dump_hang(diagnosis.context, progress))
    elif diagnosis.finding.kind in (VerdictKind.TOGETHER, *NO_FAULT):
        # without a pending call, no rank is known to be blocked
        finding = no_hang(NothingPending(), run.unwatched)
        diagnosis = replace(diagnosis, finding=finding)
    context = diagnosis.context
    finding = without_absent(diagnosis.finding, context)
    made_ns = {rank: box.made_ns for rank, box in run.dumps.items()}
    finding = checked_by_age(context, finding, made_ns)
    if progress is not None:
        finding = checked_by_pace(context, finding, progress)
    return Diagnosis(context, finding)


def _later_hang(diagnosis: Diagnosis, run: Dumps) -> Verdict | None:
    """The verdict on a hang after mismatches that are over, or on the first one that is not over;
    None if there is no hang, or the first mismatch may be its cause."""
    context, cause = diagnosis.context, diagnosis.finding.cause
    if not run.pending or not run.shows_pending or not isinstance(cause, DifferentCalls):
        return None
    current = current_mismatches(context.job_calls, job_progress(run))
    if cause.mismatch in current:
        return None
    if current:
        verdict = _mismatch(Diagnosis(context, first_mismatch(context, current)), run)
    else:
        hang = _hang(diagnosis, run)
        shows_none = isinstance(hang.finding.cause, (JustIssued, JustCompleted))
        if hang.finding.kind in NO_FAULT or shows_none:
            return None
        verdict = verdict_of(hang)
    mismatch = cause.mismatch
    title = context.title(mismatch.key)
    fact = EarlierMismatch(mismatch.culprits, title, mismatch.number, cause.differs_in)
    return replace(verdict, explanation=(*verdict.explanation, str(fact)))


def _mismatch(diagnosis: Diagnosis, run: Dumps) -> Verdict:
    """The verdict on ranks that differ. Only ranks with a pending call are blocked."""
    finding, blocked = diagnosis.finding, tuple(run.pending)
    if not run.shows_pending or not isinstance(finding.cause, DifferentCalls):
        return verdict_of(diagnosis)
    cause = replace(finding.cause, blocked=blocked)
    finding = replace(finding, cause=cause, blocked=frozenset(blocked))
    context = replace(diagnosis.context, waits={})
    verdict = verdict_of(Diagnosis(context, finding))
    if blocked or unconfirmed(run):
        return verdict
    return replace(verdict, explanation=(*verdict.explanation, str(JobContinued())))


def _title(run: Dumps, rank: int, name: str) -> str:
    box = run.dumps[rank]
    return Group(name, box.members(name) or (), desc=box.descs.get(name, "")).title


# -- completion ------------------------------------------------------------------------------------


def _with_completion(verdict: Verdict, run: Dumps) -> Verdict:
    groups = [
        group
        for group in completion(run)
        if all(reached["completed"] is not None for reached in group["ranks"])
    ]
    if not groups:
        return verdict
    group = group_of(verdict, groups)
    facts = [_completed(group)] if group is not None else []
    return replace(
        verdict,
        explanation=(*verdict.explanation, *map(str, facts)),
        facts=verdict.facts | {"flight_recorder": groups[:64]},
    )


def group_of(verdict: Verdict, groups: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The group of a verdict's collective, among those of `completion`; None if several may be
    it."""
    collective = verdict.collective or {}
    with_title = [group for group in groups if group["group"] == collective.get("group")]
    ranks = collective.get("group_ranks")
    with_ranks = [group for group in with_title if group["group_ranks"] == ranks]
    alike = with_ranks or with_title
    return alike[0] if len(alike) == 1 else None


def completion(run: Dumps) -> list[dict[str, Any]]:
    """For each group, ranks with equal progress: the last issued, started and completed collective.
    -1: none; None: the recorder does not record it, as gloo's."""
    groups: dict[tuple[str, tuple[int, ...]], dict[tuple[int, int, int, bool], list[int]]] = {}
    for rank, box in run.dumps.items():
        if box.is_own:
            continue
        for name, account in box.accounts.items():
            key = name, box.members(name) or ()
            # an abort also ends calls that the device had not reached
            has_started = box.has_states and not account.is_doubted
            started = account.started if has_started else _UNKNOWN
            progress = account.issued, started, account.completed, box.has_states
            groups.setdefault(key, {}).setdefault(progress, []).append(rank)
    return [
        {
            "group": _title(run, next(iter(by_progress.values()))[0], name),
            "group_ranks": shown_ranks(members),
            "ranks": [
                {
                    "ranks": ranks,
                    "issued": issued,
                    "started": started if started != _UNKNOWN else None,
                    "completed": completed if has_states else None,
                }
                for (issued, started, completed, has_states), ranks in sorted(
                    by_progress.items(), reverse=True
                )
            ],
        }
        for (name, members), by_progress in sorted(groups.items())
    ]


def _completed(group: dict[str, Any]) -> CompletedCalls:
    by_number: dict[int, list[int]] = {}
    for reached in group["ranks"]:
        by_number.setdefault(reached["completed"], []).extend(reached["ranks"])
    ordered = sorted(by_number.items(), reverse=True)
    return CompletedCalls(group["group"], tuple((n, tuple(sorted(ranks))) for n, ranks in ordered))

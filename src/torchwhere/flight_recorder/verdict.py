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
from torchwhere.core.place import Certainty
from torchwhere.core.worker_pool import Progress
from torchwhere.diagnose.doctor.examine import Diagnosis, examine
from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind
from torchwhere.diagnose.dump_facts import CompletedCalls, DumpCaveat, DumpsAgree, UnseenHangs
from torchwhere.diagnose.dump_hang import find_dump_hang
from torchwhere.flight_recorder.dumps import Dumps, read_dumps
from torchwhere.flight_recorder.progress import job_progress
from torchwhere.render.verdict_text.assemble import verdict_of

_WHY_EMPTY = (
    "Is the recorder on (TORCH_FR_BUFFER_SIZE, for NCCL before torch 2.9"
    " TORCH_NCCL_TRACE_BUFFER_SIZE)? gloo records no sends and receives"
)


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
    if not any(len(box.records) or box.status for box in run.dumps.values()):
        raise TorchwhereError(f"the dumps in {folder} have no entries. {_WHY_EMPTY}")
    verdict = _diagnosed(run)
    if run.cut and verdict.kind is not VerdictKind.MISMATCH:
        run = run.without(run.cut)
        if not run.boxes:
            raise TorchwhereError(
                f"all dumps in {folder} are incomplete: {'; '.join(run.caveats()[:3])}"
            )
        verdict = _diagnosed(run)
    caveats = run.caveats()
    if verdict.kind is VerdictKind.HEALTHY:
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
    # A dump does not record when it was written. It was written because a wait took too long: every
    # wait in it counts.
    diagnosis = examine(run, now_ns=run.moment_ns, stall_s=0.0)
    if diagnosis.finding.kind is VerdictKind.MISMATCH:
        return verdict_of(diagnosis)
    if run.shows_pending:
        return verdict_of(Diagnosis(*find_dump_hang(diagnosis.context, job_progress(run))))
    verdict = verdict_of(diagnosis)
    if verdict.kind not in (VerdictKind.TOGETHER, VerdictKind.HEALTHY):
        return verdict
    # without a pending call, no rank is known to be blocked
    return replace(
        verdict,
        kind=VerdictKind.HEALTHY,
        collective=None,
        last_common=None,
        explanation=(str(DumpsAgree(len(run.boxes))),),
        certainty=Certainty.INFERRED,
    )


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
    title = (verdict.collective or {}).get("group")
    facts = [_completed(group) for group in groups if group["group"] == title]
    return replace(
        verdict,
        explanation=(*verdict.explanation, *map(str, facts[:1])),
        facts=verdict.facts | {"flight_recorder": groups[:64]},
    )


def completion(run: Dumps) -> list[dict[str, Any]]:
    """For each group, ranks with equal progress: the last issued, started and completed collective.
    -1: none; None: the recorder does not record it, as gloo's."""
    groups: dict[tuple[str, tuple[int, ...]], dict[tuple[int, int, int, bool], list[int]]] = {}
    for rank, box in run.dumps.items():
        if box.is_own:
            continue
        for name, account in box.accounts.items():
            key = name, box.members(name) or ()
            progress = account.issued, account.started, account.completed, box.has_states
            groups.setdefault(key, {}).setdefault(progress, []).append(rank)
    return [
        {
            "group": _title(run, next(iter(by_progress.values()))[0], name),
            "ranks": [
                {
                    "ranks": ranks,
                    "issued": issued,
                    "started": started if has_states else None,
                    "completed": completed if has_states else None,
                }
                for (issued, started, completed, has_states), ranks in sorted(
                    by_progress.items(), reverse=True
                )
            ],
        }
        for (name, _), by_progress in sorted(groups.items())
    ]


def _completed(group: dict[str, Any]) -> CompletedCalls:
    by_number: dict[int, list[int]] = {}
    for reached in group["ranks"]:
        by_number.setdefault(reached["completed"], []).extend(reached["ranks"])
    ordered = sorted(by_number.items(), reverse=True)
    return CompletedCalls(group["group"], tuple((n, tuple(sorted(ranks))) for n, ranks in ordered))

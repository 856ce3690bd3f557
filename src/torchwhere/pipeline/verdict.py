"""Brings a run before the doctor: reads its boxes, looks at its processes, asks the suspects for
their stacks and dumps.

What a monitor has kept in the folder counts where nobody can look any more: it saw who was stopped,
who died first, and what a rank had done whose box is gone (`snapshots/read.py`). A doctor who finds
something wrong with a job that is there keeps that too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.blackbox.lazy_boxes import LazyBoxes
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import RunSummary
from torchwhere.blackbox.summary import BoxOrSummary, BoxSummary, read_checksum
from torchwhere.core.gc_pause import gc_paused
from torchwhere.diagnose.calls.job_calls import JobCalls, calls_of_run
from torchwhere.diagnose.calls.load import Progress, load_calls
from torchwhere.diagnose.clocks.host_clocks import HostClocks, align_hosts
from torchwhere.diagnose.doctor.rules import STALL_S, diagnose
from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind
from torchwhere.flight_recorder.evidence import with_evidence
from torchwhere.processes.look import look, merged
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.read import DOCTOR, fill_from_snapshots, is_of, summaries_of
from torchwhere.snapshots.read import saved_statuses as saved_statuses
from torchwhere.snapshots.write import MOST_RANKS, SnapshotWriter

Ask = Callable[[Sequence[int]], Mapping[int, dict[str, Any]]]
_SILENT_NS = 60_000_000_000
_AHEAD_NS = 3_600_000_000_000  # by which another machine's clock may be
_CALM = (VerdictKind.HEALTHY, VerdictKind.STRAGGLER)


def diagnose_folder(
    folder: str | Path, *, stall_s: float = STALL_S, on_progress: Progress | None = None
) -> Verdict:
    """The verdict on the run in a folder, now. `on_progress` is told how many boxes have been read,
    of how many."""
    with gc_paused():
        run, job_calls = load_calls(folder, on_progress=on_progress)
        verdict = diagnose_run(
            run, saved_statuses(run.folder), stall_s=stall_s, job_calls=job_calls
        )
        if verdict.kind is not VerdictKind.HEALTHY:
            _keep(run, verdict)
        return verdict


def _keep(run: RunSummary[BoxSummary], verdict: Verdict) -> None:
    """What there is to see of a job that is there, for the next who asks: it may be over by then,
    and a box gone. Where one is gone already, what was written stays."""
    diary = SnapshotWriter(run.folder, source=DOCTOR)
    if len(run.boxes) > MOST_RANKS or (run.missing and diary.path.exists()):
        return
    read_ns, read_at = time.time_ns(), time.monotonic()
    seen = look(run.boxes)
    if any(status.alive for status in seen.values()):
        stacks = {
            rank: report.stack
            for rank, report in verdict.ranks.items()
            if report.stack and rank in seen
        }
        seen |= {
            rank: replace(seen[rank], stack=stack, stack_ns=read_ns)
            for rank, stack in stacks.items()
        }
        diary.write_seen(run.boxes, seen)
        diary.write(LazyBoxes(run.boxes, kept=1), read_ns=read_ns, read_at=read_at)


def diagnose_run(
    run: RunSummary[Any],
    kept: Mapping[int, dict[str, Any]],
    *,
    stall_s: float,
    job_calls: JobCalls | None = None,
    ask: Ask | None = None,
) -> Verdict:
    """The verdict on a run that was just read. Stacks are asked for only where something is wrong;
    of `ask`, on other hosts."""
    job_calls = job_calls if job_calls is not None else calls_of_run(run)
    kept = {rank: value for rank, value in kept.items() if is_of(run, rank, value)}
    labels = dict(run.summaries) | summaries_of(kept, run)
    seen = _known_to_be_over(merged(look(labels), _not_outdated(kept, job_calls)), labels)
    _read_again(run, job_calls, [rank for rank, status in seen.items() if status.alive is False])
    job_calls, said = fill_from_snapshots(run, job_calls)
    # One clock for all hosts: stragglers are found by it.
    clocks = align_hosts(RunSummary(run.folder, run.summaries))
    verdict = _diagnose(run, job_calls, clocks, kept, seen, labels, stall_s, ask)
    return replace(verdict, missing_data=(*verdict.missing_data, *said)) if said else verdict


def _diagnose(
    run: RunSummary[Any],
    job_calls: JobCalls,
    clocks: HostClocks,
    kept: dict[int, dict[str, Any]],
    seen: Mapping[int, ProcessStatus],
    labels: Mapping[int, BoxOrSummary],
    stall_s: float,
    ask: Ask | None,
) -> Verdict:
    now_ns = _now(seen, labels)
    verdict = diagnose(
        run,
        statuses=seen,
        now_ns=now_ns,
        stall_s=stall_s,
        is_suspicion=now_ns is not None,
        job_calls=job_calls,
        clocks=clocks,
    )
    if verdict.kind in _CALM:
        return verdict
    if now_ns is None:
        return with_evidence(verdict, run.summaries, run.folder, may_ask=False)
    suspects = (
        tuple(rank for rank in verdict.culprits if rank in run.boxes)[:16] or tuple(run.boxes)[:16]
    )
    kept |= ask(suspects) if ask is not None else {}
    seen = _known_to_be_over(
        merged(look(labels, stacks=suspects), _not_outdated(kept, job_calls)), labels
    )
    verdict = diagnose(
        run, statuses=seen, now_ns=now_ns, stall_s=stall_s, job_calls=job_calls, clocks=clocks
    )
    is_there = any(status.alive for status in seen.values())
    return with_evidence(verdict, run.summaries, run.folder, may_ask=is_there)


def _known_to_be_over(
    seen: dict[int, ProcessStatus], labels: Mapping[int, BoxOrSummary]
) -> dict[int, ProcessStatus]:
    """What was seen; of a job of other hosts, that it is over, if every rank has a heart and none
    has beaten for long. One whose heart stands still while others beat may be stopped."""
    beats = [label.beat_ns for label in labels.values()]
    is_over = bool(beats) and all(beats) and max(beats) < time.time_ns() - _SILENT_NS
    if not is_over or any(status.alive for status in seen.values()):
        return seen
    return {
        rank: replace(status, alive=False) if status.alive is None else status
        for rank, status in seen.items()
    }


def _not_outdated(
    kept: Mapping[int, dict[str, Any]], job_calls: JobCalls
) -> dict[int, dict[str, Any]]:
    """What was kept, without the stacks of ranks that have moved since they were asked, without how
    those were who have moved since a witness saw them, and without that one was gone who has been
    there since."""
    labels = {rank: said.label for rank, said in job_calls.by_rank.items()}
    moved_ns = {rank: label.last_ns for rank, label in labels.items()}
    ran_ns = {rank: max(label.last_ns, label.beat_ns) for rank, label in labels.items()}
    rules: tuple[tuple[str, Mapping[int, int], dict[str, Any]], ...] = (
        ("stack_ns", moved_ns, {"stack": [], "stack_ns": None}),
        ("seen_ns", ran_ns, {"state": None}),
        ("gone_ns", ran_ns, {"alive": None, "gone_ns": None}),
    )
    current = dict(kept)
    for moment, last_ns, nothing in rules:
        old = [
            rank
            for rank, value in current.items()
            if isinstance(then := value.get(moment), int) and last_ns.get(rank, 0) > then
        ]
        current |= {rank: current[rank] | nothing for rank in old}
    return current


def _read_again(run: RunSummary[Any], job_calls: JobCalls, gone: list[int]) -> None:
    """A process may have written its last words between the reading of its box and the look that
    found it gone."""
    for rank in gone:
        if (
            rank in run.boxes
            and read_checksum(run.summaries[rank].path) != run.summaries[rank].checksum
        ):
            box = read_box(run.summaries[rank].path)
            # not of a restart
            if box.rank == rank and box.meta.get("pid") == run.summaries[rank].meta.get("pid"):
                job_calls.add_box(rank, box)


def _now(seen: Mapping[int, ProcessStatus], labels: Mapping[int, BoxOrSummary]) -> int | None:
    """The last moment at which a process of the job was alive: now, what a monitor kept, or its own
    heart; None if nobody knows."""
    looks = [status.alive_ns for status in seen.values() if status.alive_ns is not None]
    latest = time.time_ns() + _AHEAD_NS  # a damaged box may say anything
    return max(
        [*looks, *(label.beat_ns for label in labels.values() if 0 < label.beat_ns < latest)],
        default=None,
    )

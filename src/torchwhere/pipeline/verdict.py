"""Diagnoses a run: reads the boxes, looks at the processes and examines the job. If something is
wrong, asks suspected ranks for their stacks, examines the job again and saves what it saw.

Monitors save process statuses and snapshots in the run's folder. The diagnosis uses them for what
can no longer be seen: which process was stopped, which one exited first, and the calls of a rank
whose box is gone (`snapshots/read.py`). `diagnose_folder` saves the same for a running job that is
not healthy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchwhere.blackbox.lazy_boxes import LazyBoxes
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import RunSummary
from torchwhere.blackbox.summary import BoxOrSummary, BoxSummary, read_checksum
from torchwhere.core.stall import STALL_S
from torchwhere.core.worker_pool import Progress, gc_paused
from torchwhere.diagnose.calls.job_calls import JobCalls, calls_of_run, load_calls
from torchwhere.diagnose.clocks.host_clocks import HostClocks, align_hosts
from torchwhere.diagnose.doctor.examine import Diagnosis, examine
from torchwhere.diagnose.doctor.finding import Finding
from torchwhere.diagnose.doctor.pauses import MOST_ASKED
from torchwhere.diagnose.doctor.rules.no_fault import Quiet, Standstill
from torchwhere.diagnose.doctor.verdict import NO_FAULT, Verdict, VerdictKind
from torchwhere.flight_recorder.evidence import with_evidence
from torchwhere.gpus.samples import HostGpus, read_gpus
from torchwhere.processes.fault_handler import saved_stack
from torchwhere.processes.look import look, merged, with_silent_ended
from torchwhere.processes.status import ProcessStatus
from torchwhere.render.verdict_text.assemble import verdict_of
from torchwhere.render.verdict_text.observers import snapshots_text
from torchwhere.snapshots.read import (
    DOCTOR,
    fill_from_snapshots,
    is_of,
    saved_statuses,
    summaries_of,
)
from torchwhere.snapshots.write import MOST_RANKS, SnapshotWriter

SavedStatuses = dict[int, dict[str, Any]]  # process statuses by rank, as a monitor saves them
AskForStacks = Callable[[Sequence[int]], SavedStatuses]  # asks other hosts
_AHEAD_NS = 3_600_000_000_000  # the clock of another host may be this far ahead
_NOT_WRONG = NO_FAULT | {VerdictKind.STRAGGLER}


def diagnose_folder(
    folder: str | Path, *, stall_s: float = STALL_S, on_progress: Progress | None = None
) -> Verdict:
    """Diagnose the newest run in a folder, as it is now.

    `on_progress(done, total)` counts the boxes while they are read.
    """
    with gc_paused():
        run, job_calls = load_calls(folder, on_progress=on_progress)
        verdict = diagnose_run(
            run, saved_statuses(run.folder), stall_s=stall_s, job_calls=job_calls
        )
        if verdict.kind not in NO_FAULT:
            _save(run, verdict)
        return verdict


def diagnose_run(
    run: RunSummary[Any],
    saved: Mapping[int, dict[str, Any]],
    *,
    stall_s: float,
    job_calls: JobCalls | None = None,
    ask: AskForStacks | None = None,
    gpus: Sequence[HostGpus] = (),
) -> Verdict:
    """Diagnose a run that was just read, with the process statuses that monitors saved.

    Suspects are asked for their stacks only if something is wrong; `ask` reaches other hosts.
    `gpus` are those of hosts that do not share the folder.
    """
    job_calls = job_calls if job_calls is not None else calls_of_run(run)
    saved = {rank: status for rank, status in saved.items() if is_of(run, rank, status)}
    summaries = dict(run.summaries) | summaries_of(saved, run)
    names_gpus = any(box.meta.get("devices") for box in run.summaries.values())
    known_gpus = (*read_gpus(run.folder), *gpus) if names_gpus else ()
    case = _Case(run, job_calls, saved, summaries, stall_s, known_gpus)
    statuses = case.look_at_processes()
    exited = [rank for rank, status in statuses.items() if status.alive is False]
    _read_again(run, job_calls, exited)
    case.job_calls = fill_from_snapshots(run, job_calls)
    verdict = case.judge(statuses, ask)
    if case.job_calls is job_calls:
        return verdict
    remark = snapshots_text(case.job_calls)
    return replace(verdict, missing_data=(*verdict.missing_data, remark))


@dataclass(slots=True)
class _Case:
    """One run with everything that the doctor needs to judge it."""

    run: RunSummary[Any]
    job_calls: JobCalls
    saved: SavedStatuses
    summaries: Mapping[int, BoxOrSummary]  # of the boxes, and of ranks that only a monitor saw
    stall_s: float
    gpus: Sequence[HostGpus]
    _clocks: HostClocks | None = None

    def look_at_processes(self, *, stacks: Sequence[int] = ()) -> dict[int, ProcessStatus]:
        """Merge what this host shows with what monitors saved. Ask the ranks of `stacks`."""
        saved = _without_outdated(self.saved, self.job_calls)
        statuses = merged(look(self.summaries, stacks=stacks), saved)
        beats_ns = [summary.beat_ns for summary in self.summaries.values()]
        return with_silent_ended(statuses, beats_ns)

    def judge(self, statuses: Mapping[int, ProcessStatus], ask: AskForStacks | None) -> Verdict:
        """Examine the run; if something is wrong, ask suspects for stacks and examine it again."""
        now_ns = _last_alive_ns(statuses, self.summaries)
        diagnosis = self._examine(statuses, now_ns, is_suspicion=now_ns is not None)
        if diagnosis.finding.kind in _NOT_WRONG:
            cause = diagnosis.finding.cause
            if isinstance(cause, Standstill | Quiet):  # stacks that ranks save may show a pause
                ranks = cause.pause.ranks if isinstance(cause, Standstill) else list(self.run.boxes)
                statuses = self._with_stall_stacks(statuses, ranks[:MOST_ASKED])
                diagnosis = self._examine(statuses, now_ns, is_suspicion=False)
            return verdict_of(diagnosis)
        is_running = False
        if now_ns is not None:
            suspects = self._suspects(diagnosis.finding)
            if ask is not None:
                self.saved |= ask(suspects)
            statuses = self.look_at_processes(stacks=suspects)
            diagnosis = self._examine(statuses, now_ns, is_suspicion=False)
            is_running = any(status.alive for status in statuses.values())
        verdict = verdict_of(diagnosis)
        return with_evidence(verdict, self.run.summaries, self.run.folder, may_ask=is_running)

    def _examine(
        self, statuses: Mapping[int, ProcessStatus], now_ns: int | None, *, is_suspicion: bool
    ) -> Diagnosis:
        return examine(
            self.run,
            statuses=statuses,
            now_ns=now_ns,
            stall_s=self.stall_s,
            is_suspicion=is_suspicion,
            job_calls=self.job_calls,
            align_clocks=self._align_clocks,
            gpus=self.gpus,
        )

    def _with_stall_stacks(
        self, statuses: Mapping[int, ProcessStatus], ranks: Sequence[int]
    ) -> dict[int, ProcessStatus]:
        """Add the stacks that stalled ranks have saved. No process is signalled for a pause."""
        current = dict(statuses)
        for rank in ranks:
            if rank in self.run.boxes and rank in current:
                calls = self.job_calls.by_rank[rank]
                moved_ns = max(calls.box_summary.last_ns, calls.rank_summary.moved_ns)
                stack = saved_stack(self.run.summaries[rank].path, moved_ns=moved_ns)
                current[rank] = replace(current[rank], stack=stack)
        return current

    def _align_clocks(self) -> HostClocks:
        """One clock for all hosts: lateness is measured on it."""
        if self._clocks is None:
            self._clocks = align_hosts(RunSummary(self.run.folder, self.run.summaries))
        return self._clocks

    def _suspects(self, finding: Finding) -> list[int]:
        culprits = [rank for rank in finding.culprits if rank in self.run.boxes]
        return (culprits or list(self.run.boxes))[:MOST_ASKED]


# -- statuses --------------------------------------------------------------------------------------


def _without_outdated(saved: Mapping[int, dict[str, Any]], job_calls: JobCalls) -> SavedStatuses:
    """Drop stale fields.

    These are stacks older than the rank's last event, states older than its last event or
    heartbeat, and exits of processes that were alive later.
    """
    summaries = {rank: calls.box_summary for rank, calls in job_calls.by_rank.items()}
    moved_ns = {rank: summary.last_ns for rank, summary in summaries.items()}
    alive_ns = {rank: max(box.last_ns, box.beat_ns) for rank, box in summaries.items()}
    # a saved time, the last sign of life by rank, and the fields that a newer sign resets
    expiries: tuple[tuple[str, Mapping[int, int], dict[str, Any]], ...] = (
        ("stack_ns", moved_ns, {"stack": [], "stack_ns": None, "workers": []}),
        ("seen_ns", alive_ns, {"state": None}),
        ("gone_ns", alive_ns, {"alive": None, "gone_ns": None}),
    )
    current = dict(saved)
    for saved_at, last_ns, reset in expiries:
        for rank, status in current.items():
            saved_ns = status.get(saved_at)
            if isinstance(saved_ns, int) and last_ns.get(rank, 0) > saved_ns:
                current[rank] = status | reset
    return current


def _last_alive_ns(
    statuses: Mapping[int, ProcessStatus], summaries: Mapping[int, BoxOrSummary]
) -> int | None:
    """The last time a process of the job was alive: as seen now, as saved, or by its heartbeat."""
    seen = [status.alive_ns for status in statuses.values() if status.alive_ns is not None]
    latest = time.time_ns() + _AHEAD_NS  # a damaged box may hold any number
    beats = [box.beat_ns for box in summaries.values() if 0 < box.beat_ns < latest]
    return max([*seen, *beats], default=None)


# -- boxes -----------------------------------------------------------------------------------------


def _read_again(run: RunSummary[Any], job_calls: JobCalls, exited: list[int]) -> None:
    """Read boxes again that a process changed after they were read and before it exited."""
    for rank in exited:
        if rank not in run.boxes:
            continue
        summary = run.summaries[rank]
        if read_checksum(summary.path) == summary.checksum:
            continue
        box = read_box(summary.path)
        is_same_process = box.rank == rank and box.meta.get("pid") == summary.meta.get("pid")
        if is_same_process:  # a restart may have replaced the box
            job_calls.add_box(rank, box)


def _save(run: RunSummary[BoxSummary], verdict: Verdict) -> None:
    """Save statuses, stacks and snapshots of a running job for a later diagnosis.

    By then the job may have ended and a box may be gone. If one is gone already, the older snapshot
    knows more and stays.
    """
    if len(run.boxes) > MOST_RANKS:
        return
    read_ns = time.time_ns()
    read_at = time.monotonic()
    statuses = look(run.boxes)
    if not any(status.alive for status in statuses.values()):
        return
    writer = SnapshotWriter(run.folder, source=DOCTOR)
    if run.missing and writer.path.exists():
        return
    for rank, report in verdict.ranks.items():
        if report.stack and rank in statuses:
            statuses[rank] = replace(
                statuses[rank], stack=report.stack, stack_ns=read_ns, workers=report.workers
            )
    writer.write_seen(run.boxes, statuses)
    writer.write(LazyBoxes(run.boxes, kept=1), read_ns=read_ns, read_at=read_at)

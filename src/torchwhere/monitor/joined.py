"""Joins the boxes of one host with the snapshots of the others, as input of one diagnosis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchwhere.blackbox.run import BoxRun, RunSummary
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.gpus.samples import HostGpus
from torchwhere.monitor.single import NOUN, Inputs, SavedStatuses
from torchwhere.snapshots.encode import CALLS, HostSnapshot


@dataclass(slots=True)
class JoinedData:
    """Starts with the boxes of this host; `add` adds the snapshot of another one."""

    job_calls: JobCalls
    boxes: dict[int, Any]
    saved: SavedStatuses = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    gpus: list[HostGpus] = field(default_factory=list)

    def add(self, host: int, snapshot: HostSnapshot) -> None:
        """Add the ranks of a snapshot. A box of this host wins over a snapshot."""
        summaries = {
            summary.box_summary.rank: summary.box_summary
            for summary in snapshot.batch.rank_summaries
            if summary.box_summary.rank not in self.boxes
        }
        wanted = {box.path for box in summaries.values() if not box.lacks_counts}
        self.job_calls.add_batch(snapshot.batch, encoder=host, wanted=wanted)
        self.boxes |= summaries
        self.gpus += [snapshot.gpus] if snapshot.gpus is not None else []
        self.saved |= {
            rank: snapshot.statuses[rank].to_dict()
            for rank in summaries
            if rank in snapshot.statuses
        }
        if snapshot.is_cut and summaries:
            self.missing.append(
                f"{ranks_phrase(summaries)} on host {snapshot.host}: only the last {CALLS}"
                " collectives were compared"
            )

    def inputs(self, run: BoxRun) -> Inputs:
        self.job_calls.by_rank = dict(sorted(self.job_calls.by_rank.items()))
        boxes = dict(sorted(self.boxes.items()))
        unreadable: list[Any] = list(run.unreadable)
        job = RunSummary(run.folder, boxes, run.earlier, unreadable, noun=NOUN, notes=self.missing)
        return Inputs(job, self.job_calls, self.saved, self.gpus)

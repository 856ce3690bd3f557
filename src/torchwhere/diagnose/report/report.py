"""All that the report page shows of a run, as data: `make_report` puts the parts together,
`Report.to_dict` is its JSON.

Takes a run, what its ranks said (`JobCalls`, with the `Digest`s that were taken on the way) and the
verdict; reads a few of the boxes once more, those that can be looked at closely. Linear in the
number of ranks; the JSON of 10,000 ranks is about 2 MB, because what exists per rank is a column of
numbers, and everything else is bounded. `docs/report.md` has the fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.run import RunSummary
from torchwhere.core.results import Shown
from torchwhere.core.sanitize import printable
from torchwhere.diagnose.calls.rank_calls import JobCalls
from torchwhere.diagnose.clocks.host_clocks import moments
from torchwhere.diagnose.diff.comparison import find_logs
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.diagnose.report.collectives import Streams, streams
from torchwhere.diagnose.report.details import Detail, chosen_ranks, details, read_boxes
from torchwhere.diagnose.report.digest import Digest, Summary
from torchwhere.diagnose.report.graph_rows import GraphRow, graphs
from torchwhere.diagnose.report.layouts import LayoutTexts, layout_texts
from torchwhere.diagnose.report.log import MOST_RANKS, LogDigest, log, log_files
from torchwhere.diagnose.report.modules import Modules, modules
from torchwhere.diagnose.report.phase_heat import PhaseHeat, phase_heat
from torchwhere.diagnose.report.ranks import Ranks, newest_ns, ranks
from torchwhere.diagnose.report.steps import Steps, steps
from torchwhere.diagnose.report.texts import cut

VERSION = 1
_MOST_LAYOUTS = 256


@dataclass(frozen=True, slots=True, repr=False)
class Report(Shown):
    """A run, as the page shows it. By itself it shows its verdict."""

    title: str
    made_at: datetime
    verdict: Verdict
    ranks: Ranks
    details: dict[int, Detail]
    modules: Modules
    collectives: Streams
    steps: Steps
    phases: PhaseHeat
    layout: LayoutTexts
    graphs: tuple[GraphRow, ...]
    log: LogDigest
    missing: tuple[str, ...]  # what could not be known, and what was left out
    settings: dict[str, str | int]

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        return (
            cut(self.verdict.explanation[0].strip())
            if self.verdict.explanation
            else str(self.verdict.kind)
        )

    def __repr__(self) -> str:
        return printable(f"<Report on {len(self.ranks.rank)} ranks: {self.headline}>")

    def __str__(self) -> str:
        return str(self.verdict)

    def _repr_html_(self) -> str:
        return self.verdict._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "title": cut(self.title),
            "made_at": self.made_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "verdict": self.verdict.to_dict() | {"headline": self.headline},
            "ranks": self.ranks.to_dict(),
            "details": {str(rank): detail.to_dict() for rank, detail in self.details.items()},
            "world_size": len(self.ranks.rank),
            "modules": self.modules.to_dict(),
            "collectives": [stream.to_dict() for stream in self.collectives.shown],
            "more_groups": self.collectives.more,
            "steps": self.steps.to_dict(),
            "phases": self.phases.to_dict(),
            "layout": self.layout.to_dict(),
            "graphs": [graph.to_dict() for graph in self.graphs],
            "log": self.log.to_dict(),
            "missing": [cut(sentence) for sentence in self.missing],
            "settings": self.settings,
        }


def make_report(
    run: RunSummary[Any], *, job_calls: JobCalls, verdict: Verdict, made_at: datetime | None = None
) -> Report:
    """All parts. `hearing` comes with digests (`clerks.hear_folder(..., aside=Digest)`): without
    them there are no steps, times, phases and graphs."""
    summaries = _summaries(run, job_calls.extras)
    near = read_boxes(run, chosen_ranks(run, verdict))
    when = moments(run)
    return Report(
        title=run.folder.resolve().name,
        made_at=made_at if made_at is not None else datetime.now(UTC),
        verdict=verdict,
        ranks=ranks(run, job_calls, verdict, when),
        details=details(near, verdict, when, newest_ns=newest_ns(run, when)),
        modules=modules(job_calls, summaries),
        collectives=streams(job_calls, verdict, when),
        steps=steps(job_calls, summaries, verdict),
        phases=phase_heat(summaries),
        layout=_layout(run, near),
        graphs=tuple(graphs(summaries)),
        log=log(_for_log(run, near, verdict), log_files(find_logs(run.folder, None))),
        missing=(*verdict.missing_data, *_left_out(run)),
        settings=settings(run, near, summaries),
    )


def _left_out(run: RunSummary[Any]) -> list[str]:
    count = len(run.earlier)
    return (
        [
            f"{count} box{'es' * (count > 1)} of earlier runs or restarts in the same folder:"
            " left out"
        ]
        if count
        else []
    )


def _summaries(run: RunSummary[Any], extras: Sequence[Any]) -> dict[int, Summary]:
    """Those of the run's boxes, by rank."""
    digests = [extra for extra in extras if isinstance(extra, Digest)]
    by_path = {summary.path: summary for digest in digests for summary in digest.summaries}
    return {
        rank: by_path[box.path] for rank, box in sorted(run.boxes.items()) if box.path in by_path
    }


def _layout(run: RunSummary[Any], near: dict[int, Box]) -> LayoutTexts:
    """Of all ranks; of thousands, those near at hand and others from all over the job."""
    others = [rank for rank in run.boxes if rank not in near]
    room = _MOST_LAYOUTS - len(near)
    # No even step: that might meet the same place of a mesh every time.
    spread = sorted(others, key=lambda rank: rank * 2654435761 % (1 << 32))[:room]
    return layout_texts(near | read_boxes(run, spread), of=len(run.boxes))


def _for_log(run: RunSummary[Any], near: dict[int, Box], verdict: Verdict) -> dict[int, Box]:
    chosen = [rank for rank in chosen_ranks(run, verdict) if rank in near]
    blamed = [rank for rank in verdict.culprits if rank in near][: MOST_RANKS // 2]
    return {rank: near[rank] for rank in list(dict.fromkeys([*blamed, *chosen]))[:MOST_RANKS]}


def settings(
    run: RunSummary[Any], boxes: dict[int, Box], summaries: dict[int, Summary]
) -> dict[str, str | int]:
    """What the run was made with, as far as a box says it."""
    hosts = {str(box.meta.get("host")) for box in run.boxes.values() if box.meta.get("host")}
    found: dict[str, str | int] = {
        "world size": run.world_size,
        "boxes": len(run.boxes),
        "hosts": len(hosts),
    }
    box = next(iter(boxes.values()), None)
    meta = box.meta if box is not None else {}
    for name in ("torch", "python", "torchwhere"):
        if isinstance(meta.get(name), str):
            found[name] = cut(meta[name])
    if box is not None and box.geometry is not None:
        found["ring"] = f"{box.geometry.capacity:,} records"
    found["module events"] = (
        "on" if any(summary.modules for summary in summaries.values()) else "off"
    )
    started = min(
        (
            ns
            for one in run.boxes.values()
            if isinstance(ns := one.meta.get("started_ns"), int) and ns > 0
        ),
        default=0,
    )
    if 0 < started < 1 << 62:
        found["started"] = datetime.fromtimestamp(started // 10**9, UTC).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        )
    if isinstance(meta.get("folder"), str):
        found["folder"] = cut(meta["folder"])
    if isinstance(meta.get("argv"), list):
        found["command"] = cut(" ".join(map(str, meta["argv"])))
    return found | {"run": cut(Path(run.folder).name)}

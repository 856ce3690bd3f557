"""Everything that the report page shows of a run, as data.

Takes a run, its calls (`JobCalls`, with the `Digest`s collected while loading) and its verdict.
Reads a few boxes again: those of the ranks shown in detail. Linear in the number of ranks. The JSON
of 10,000 ranks is about 2 MB, because data of each rank is a column of numbers and everything else
has a limit. `docs/report.md` describes the fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.run import RunSummary
from torchwhere.core.results import Fact, Shown, plain, plain_fields
from torchwhere.core.sanitize import plural, printable
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.clocks.host_clocks import align_hosts
from torchwhere.diagnose.device_time.job import JobDeviceTimes
from torchwhere.diagnose.diff.comparison import find_logs
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.diagnose.report.collectives import Streams, streams
from torchwhere.diagnose.report.details import Detail, chosen_ranks, details, read_boxes
from torchwhere.diagnose.report.device import device_json, device_times
from torchwhere.diagnose.report.digest import Digest, DigestedBox
from torchwhere.diagnose.report.facts import EarlierBoxes
from torchwhere.diagnose.report.graph_rows import GraphRow, graphs
from torchwhere.diagnose.report.layouts import LayoutTexts, layout_texts
from torchwhere.diagnose.report.log import MOST_RANKS, LogDigest, log, log_files
from torchwhere.diagnose.report.modules import Modules, modules
from torchwhere.diagnose.report.phase_heat import PhaseHeat, job_step_parts, phase_heat
from torchwhere.diagnose.report.ranks import Ranks, newest_ns, ranks
from torchwhere.diagnose.report.steps import Steps, steps
from torchwhere.diagnose.report.texts import cut
from torchwhere.gpus.samples import read_gpus

VERSION = 1
_MOST_LAYOUTS = 256


@dataclass(frozen=True, slots=True, repr=False)
class Report(Shown):
    """The report on a run. Shows its verdict when it is printed."""

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
    missing: tuple[str | Fact, ...]  # data that is missing or left out
    settings: dict[str, str | int]
    device: JobDeviceTimes | None = None  # None: no device, or too many ranks

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        if self.verdict.explanation:
            return cut(self.verdict.explanation[0].strip())
        return str(self.verdict.kind)

    def __repr__(self) -> str:
        return printable(f"<Report on {plural(len(self.ranks.rank), 'rank')}: {self.headline}>")

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
            **plain_fields(self, "ranks", "details"),
            "world_size": len(self.ranks.rank),
            "modules": self.modules.to_dict(),
            "collectives": plain(self.collectives.shown),
            "more_groups": self.collectives.more,
            **plain_fields(self, "steps", "phases", "layout", "graphs", "log"),
            "missing": [cut(sentence) for sentence in self.missing],
            "settings": self.settings,
            **({"device": device_json(self.device)} if self.device is not None else {}),
        }


def make_report(
    run: RunSummary[Any],
    *,
    job_calls: JobCalls,
    verdict: Verdict,
    digests: Sequence[Digest] = (),
    made_at: datetime | None = None,
) -> Report:
    """Put all sections together. Without digests (`load_calls_with(Digest, ...)`)
    there are no steps, times, phases and graphs."""
    boxes = _digested(run, digests)
    near = read_boxes(run, chosen_ranks(run, verdict))
    when = align_hosts(run)
    left_out: list[Fact] = [EarlierBoxes(len(run.earlier))] if run.earlier else []
    device, without_device = device_times(run, job_calls, when)
    parts, without_parts = job_step_parts(run, boxes, when)
    left_out += [*without_device, *without_parts]
    return Report(
        title=run.folder.resolve().name,
        made_at=made_at if made_at is not None else datetime.now(UTC),
        verdict=verdict,
        ranks=ranks(run, job_calls, verdict, when),
        details=details(
            near,
            verdict,
            when,
            newest_ns=newest_ns(run, when),
            gpus=read_gpus(run.folder),
        ),
        modules=modules(job_calls, boxes),
        collectives=streams(job_calls, verdict, when),
        steps=steps(job_calls, boxes, verdict, when),
        phases=phase_heat(boxes, parts),
        layout=_layout(run, near),
        graphs=tuple(graphs(boxes)),
        log=log(_for_log(run, near, verdict), log_files(find_logs(run.folder, None))),
        missing=(*verdict.missing_data, *left_out),
        settings=settings(run, near, boxes),
        device=device,
    )


def _digested(run: RunSummary[Any], digests: Sequence[Digest]) -> dict[int, DigestedBox]:
    """The digested boxes of the run, by rank."""
    by_path = {box.path: box for digest in digests for box in digest.boxes}
    return {
        rank: by_path[box.path] for rank, box in sorted(run.boxes.items()) if box.path in by_path
    }


def _layout(run: RunSummary[Any], near: dict[int, Box]) -> LayoutTexts:
    """The layouts of all ranks; of thousands, those of the boxes in `near` and a spread of
    others."""
    others = [rank for rank in run.boxes if rank not in near]
    most = _MOST_LAYOUTS - len(near)
    # No even stride: it might hit the same coordinate of a mesh every time.
    spread = sorted(others, key=lambda rank: rank * 2654435761 % (1 << 32))[:most]
    return layout_texts(near | read_boxes(run, spread), of=len(run.boxes))


def _for_log(run: RunSummary[Any], near: dict[int, Box], verdict: Verdict) -> dict[int, Box]:
    chosen = [rank for rank in chosen_ranks(run, verdict) if rank in near]
    blamed = [rank for rank in verdict.culprits if rank in near][: MOST_RANKS // 2]
    return {rank: near[rank] for rank in list(dict.fromkeys([*blamed, *chosen]))[:MOST_RANKS]}


def settings(
    run: RunSummary[Any], boxes: dict[int, Box], digested: dict[int, DigestedBox]
) -> dict[str, str | int]:
    """The settings of the run that its boxes record."""
    metas = [box.meta for box in run.boxes.values()]
    hosts = {str(meta["host"]) for meta in metas if meta.get("host")}
    has_modules = any(box.modules for box in digested.values())
    values: dict[str, str | int] = {
        "world size": run.world_size,
        "boxes": len(run.boxes),
        "hosts": len(hosts),
    }
    box = next(iter(boxes.values()), None)
    meta = box.meta if box is not None else {}
    for name in ("torch", "python", "torchwhere"):
        if isinstance(meta.get(name), str):
            values[name] = cut(meta[name])
    if box is not None and box.geometry is not None:
        values["ring"] = f"{box.geometry.capacity:,} records"
    values["module events"] = "on" if has_modules else "off"
    starts = [start for start in (other.get("started_ns") for other in metas) if _is_time(start)]
    if starts:
        started = datetime.fromtimestamp(min(starts) // 10**9, UTC)
        values["started"] = started.strftime("%Y-%m-%dT%H:%M:%SZ")
    if isinstance(meta.get("folder"), str):
        values["folder"] = cut(meta["folder"])
    if isinstance(meta.get("argv"), list):
        values["command"] = cut(" ".join(map(str, meta["argv"])))
    return values | {"run": cut(Path(run.folder).name)}


def _is_time(ns: object) -> bool:
    return isinstance(ns, int) and 0 < ns < 1 << 62
